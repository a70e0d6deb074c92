"""What becomes of the JSON that an engine sends, without a server."""

import copy
import json

import pytest

from claw_train.errors import EngineError
from claw_train.serving.versions import Route, ServedVersions, served_name
from claw_train.serving.wire import generate_body, read_completion, read_scores, score_body
from claw_train.types import GenerateRequest, Sampling, Version, WeightKind, WeightRef

BASE, ONE, TWO = (Version("main", 0, step) for step in range(3))
SAMPLING = Sampling()


def reply(**meta):
    """A stock SGLang reply of three tokens."""
    return {
        "text": "abc",
        "output_ids": [7, 8, 9],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": 9},
            "weight_version": "main-0-0",
            "output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None], [-0.25, 9, None]],
            **meta,
        },
    }


def read(body):
    return read_completion(body, SAMPLING, Version.parse)


def test_spans_label_each_token():
    spans = [{"version": "main-0-1", "start": 0, "end": 1}, {"version": "main-0-2", "start": 1, "end": 3}]
    assert read(reply(weight_versions=spans)).versions == (ONE, TWO, TWO)


def test_one_name_labels_the_whole_reply():
    assert read(reply(weight_version="main-0-2")).versions == (TWO,) * 3


@pytest.mark.parametrize(
    "meta",
    [
        {"finish_reason": None},
        {"finish_reason": {"type": "tired"}},
        {"weight_version": None},
        {"weight_version": "default"},
        {"weight_versions": [{"version": "main-0-1", "start": 0, "end": 2}]},
        {"weight_versions": [{"version": "main-0-1", "start": 1, "end": 3}]},
        {"weight_versions": [{"version": "main-0-1", "start": 0, "end": 4}]},
        {"output_token_logprobs": [[-0.5, 7, None], [-1.0, 8, None]]},
        {"output_token_logprobs": [[-0.5, 7, None], [-1.0, 9, None], [-0.25, 9, None]]},
        {"output_token_logprobs": [[-0.5, 7, None], [None, 8, None], [-0.25, 9, None]]},
        {"output_token_logprobs": [[-0.5, 7, None], [float("inf"), 8, None], [-0.25, 9, None]]},
        {"output_token_logprobs": [[-0.5, 7, None], [-3.4028234663852886e38, 8, None], [-0.25, 9, None]]},
        {"output_token_logprobs": [[-0.5, 7, None], [0.7, 8, None], [-0.25, 9, None]]},
    ],
)
def test_an_unsound_reply_is_an_error(meta):
    with pytest.raises((EngineError, ValueError)):
        read(reply(**meta))


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    1 << 70,
    0.5,
    float("nan"),
    float("-inf"),
    "",
    "x",
    [],
    [[]],
    [None],
    [7, 8],
    {},
    {"a": 1},
]


def _places(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inner:
        yield from _places(below, (*path, key))


def test_damage_anywhere_is_an_engine_error_or_harmless():
    sound = reply(weight_versions=[{"version": "a-0-0", "start": 0, "end": 3}])
    refused = 0
    for place in list(_places(sound))[1:]:
        for value in JUNK:
            body = copy.deepcopy(sound)
            spot = body
            for key in place[:-1]:
                spot = spot[key]
            spot[place[-1]] = value
            try:
                found = read_completion(body, SAMPLING, lambda name: BASE)
            except EngineError:
                refused += 1
                continue
            assert len(found.token_ids) == len(found.logprobs) == len(found.versions)
            assert all(-1e6 < p <= 0 for p in found.logprobs)
    assert refused > 200


def test_scores_leave_out_the_last_prompt_token():
    meta = {"input_token_logprobs": [[None, 5, None], [-0.5, 7, None], [-0.75, 8, None]]}
    assert read_scores(reply(**meta), (7, 8), 0, Version.parse).logprobs == (-0.5, -0.75)


def test_too_few_of_the_likeliest_tokens_is_an_error():
    meta = {
        "input_token_logprobs": [[None, 5, None], [-0.5, 7, None]],
        "input_top_logprobs": [None, [[-0.5, 7, None]]],
    }
    with pytest.raises(EngineError, match="1 of the 2"):
        read_scores(reply(**meta), (7,), 2, Version.parse)


def test_bodies_are_json_and_name_the_adapter():
    request = GenerateRequest(id="r", prompt_ids=(1, 2), sampling=Sampling(seed=5, stop=("x",), stop_token_ids=(2,)))
    body = json.loads(json.dumps(generate_body(request, "r;", "main-0-1")))
    assert (body["input_ids"], body["lora_path"], body["sampling_params"]["sampling_seed"]) == ([1, 2], "main-0-1", 5)
    scored = score_body("s;", (1, 2), (3,), 0, None)
    assert (scored["input_ids"], scored["logprob_start_len"], "lora_path" in scored) == ([1, 2, 3], 1, False)


@pytest.mark.parametrize(
    ("live", "priorities", "sent"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_live_request_overtakes_in_servers_that_know_how(live, priorities, sent):
    request = GenerateRequest(id="r", prompt_ids=(1,), sampling=SAMPLING, live=live)
    assert ("priority" in generate_body(request, "r;", None, priorities=priorities)) == sent


# which weights answered


def full(step):
    return WeightRef(version=Version("main", 0, step), kind=WeightKind.FULL, path="/w", checksum="")


def lora(step):
    return WeightRef(version=Version("main", 0, step), kind=WeightKind.LORA, path="/w", checksum="")


def test_a_stock_server_may_call_its_first_weights_default():
    versions = ServedVersions(BASE, stock=True)
    assert versions.label("default", versions.route(None)) == BASE


def test_a_stock_server_names_no_adapter_but_ours_must():
    for stock in (True, False):
        versions = ServedVersions(BASE, stock=stock)
        versions.loaded(lora(1))
        route = versions.route(None)
        if stock:
            assert versions.label("default", route) == ONE
        else:
            with pytest.raises(EngineError, match=r"asked adapter main-0-1-[0-9a-f]{12}, answered by main-0-0"):
                versions.label("main-0-0", route)


def test_base_weights_serve_every_lineage():
    versions = ServedVersions(BASE, stock=False)
    assert versions.route(Version("judge", 4, 0)) == Route(Version("judge", 4, 0), None)
    assert versions.label("main-0-0", versions.route(Version("judge", 4, 0))) == Version("judge", 4, 0)


def test_weights_may_be_named_before_their_load_has_returned():
    versions = ServedVersions(BASE, stock=False)
    route = versions.route(None)
    versions.announce(full(1))
    assert versions.label(served_name(full(1)), route) == ONE


def test_unknown_weights_are_an_error():
    versions = ServedVersions(BASE, stock=True)
    with pytest.raises(EngineError, match="never loaded"):
        versions.label("main-3-9", versions.route(None))


def test_an_adapter_in_use_is_given_back_to_a_restarted_server():
    versions = ServedVersions(BASE, stock=False)
    versions.loaded(lora(1))
    with versions.using(versions.route(ONE)):
        for step in (2, 3, 4):
            versions.loaded(lora(step))
        assert [ref.version.step for ref in versions.kept()] == [1, 3, 4]
    assert [ref.version.step for ref in versions.kept()] == [3, 4]
