"""Parts of the engine that a server shows only indirectly: sampling, rows, kept prefixes, faults in a pass."""

import dataclasses
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_train.engine import scheduler as scheduler_module
from claw_train.engine.checkpoint import load_weights
from claw_train.engine.intake import Intake, QueueFullError
from claw_train.engine.kv import KvStore
from claw_train.engine.layout import choose_shared
from claw_train.engine.prefix import BLOCK, PrefixCache, boundaries
from claw_train.engine.protocol import GenerateBody
from claw_train.engine.request import FinishKind, Params, Request
from claw_train.engine.sampling import Draw, draw, uniform
from claw_train.engine.scheduler import Limits, Scheduler
from claw_train.engine.spec import read_spec
from claw_train.engine.text import Texts
from claw_train.errors import ModelError

LAYERS, HEADS, DIM = 2, 1, 4


def store(budget: int) -> KvStore:
    return KvStore(
        budget=budget, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype=torch.float32, device=torch.device("cpu")
    )


def fill(row, tokens: list[int]) -> None:
    """Writes each token's id into its place."""
    for layer in row.pool.layers:
        layer[row.start : row.start + len(tokens)] = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
    row.filled = len(tokens)


def held(row) -> list[int]:
    return row.read(0, row.filled)[-1, :, 0, 0].int().tolist()


# ---- sampling


@pytest.mark.parametrize(
    ("options", "support"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.45}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"top_k": 3, "min_p": 0.5}, {0, 1}),
        ({"temperature": 0.0}, {0}),
        ({"banned": frozenset({0})}, {1, 2, 3}),
    ],
)
def test_only_the_kept_tokens_are_drawn_and_all_of_them(options, support):
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    draws = [Draw(**{"temperature": 1.0, "uniform": i / 200, **options}) for i in range(200)]
    drawn = draw(logits.repeat(200, 1), draws)
    assert {d.token for d in drawn} == support
    if "banned" not in options and options.get("temperature") != 0.0:
        for d in drawn:
            assert d.logprob == pytest.approx(logits[d.token].item(), abs=1e-5)


def test_drawn_shares_are_the_probabilities():
    p = torch.softmax(torch.randn(1000, generator=torch.Generator().manual_seed(0)), -1)
    n = 4000
    drawn = draw(p.log().repeat(n, 1), [Draw(temperature=1.0, uniform=(i + 0.5) / n) for i in range(n)])
    counts = torch.bincount(torch.tensor([d.token for d in drawn]), minlength=1000) / n
    assert (counts - p).abs().max() < 1.01 / n


@given(st.integers(0, 2**63), st.integers(0, 10**6))
def test_uniforms_lie_in_the_unit_interval(seed, position):
    assert 0 <= uniform(seed, position) < 1


def test_uniforms_are_spread_evenly():
    values = torch.tensor([uniform(7, i) for i in range(20000)], dtype=torch.float64)
    shares = torch.histc(values, 20, 0, 1) / len(values)
    assert (shares - 0.05).abs().max() < 0.01
    assert torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1].abs() < 0.03


def test_logits_that_are_not_finite_give_no_logprob():
    rows = torch.zeros(3, 8)
    rows[1] = float("nan")
    drawn = draw(rows, [Draw(temperature=1.0, uniform=0.5)] * 3)
    assert [math.isnan(d.logprob) for d in drawn] == [False, True, False]


# ---- rows and prefixes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 300)), max_size=40))
def test_rows_keep_what_they_hold_and_stay_inside_the_budget(moves):
    kv = store(1500)
    rows: dict[int, tuple[object, list[int]]] = {}
    for n, (add, size) in enumerate(moves):
        if add:
            row = kv.reserve(size, lambda _: None)
            if row is not None:
                fill(row, [n * 1000 + i for i in range(size)])
                rows[n] = (row, [n * 1000 + i for i in range(size)])
        elif rows:
            kv.release(rows.pop(sorted(rows)[size % len(rows)])[0])
        assert kv.allocated <= 1500
        for row, tokens in rows.values():
            assert held(row) == tokens


def test_a_poisoned_row_leaves_nothing_that_is_not_finite():
    kv = store(1000)
    first, last = (kv.reserve(60, lambda _: None) for _ in range(2))
    fill(last, [1] * 5)
    for layer in first.pool.layers:
        layer[first.start : first.start + 60] = float("nan")
    first.filled = 60
    kv.release(first, poisoned=True)
    assert all(layer.isfinite().all() for layer in last.pool.layers)
    assert held(last) == [1] * 5


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_match_is_a_prefix_kept_under_the_same_key(data):
    kv = store(600)
    cache = PrefixCache(kv)
    kept: list[tuple[str, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        key = data.draw(st.sampled_from("ab"))
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=120))
        offset = 0 if key == "a" else 100
        covered = sum(b.shape[1] for b in cache.match(key, tokens))
        found = [x for b in cache.match(key, tokens) for x in b[0, :, 0, 0].int().tolist()]
        assert found == [t + offset for t in tokens[:covered]]
        if covered:
            assert any(k == key and old[:covered] == tokens[:covered] for k, old in kept)
        row = kv.reserve(len(tokens), cache.evict)
        assert row is not None
        fill(row, [t + offset for t in tokens])
        cache.keep(key, tokens, row)
        kv.release(row)
        kept.append((key, tokens))
        assert kv.allocated + kv.kept <= 600


def test_the_least_recently_used_prefix_goes_first():
    kv = store(4 * BLOCK + 64)
    cache = PrefixCache(kv)
    prompts = [[n] * BLOCK for n in range(5)]
    row = kv.reserve(BLOCK, cache.evict)
    for n in (0, 1, 2, 3):
        cache.keep("k", prompts[n], row)
    cache.match("k", prompts[0])
    cache.keep("k", prompts[4], row)
    assert [bool(cache.match("k", p)) for p in prompts] == [True, False, True, True, True]


def test_dropping_a_key_frees_its_blocks_only():
    kv = store(1000)
    cache = PrefixCache(kv)
    row = kv.reserve(64, cache.evict)
    cache.keep("a", list(range(64)), row)
    cache.keep("b", list(range(32)), row)
    cache.drop("a")
    assert kv.kept == 32
    assert cache.match("a", list(range(64))) == []
    assert sum(b.shape[1] for b in cache.match("b", list(range(64)))) == 32


# ---- the thread


class Broken:
    """A model whose passes fail while `faults` last."""

    faults = 0

    def __init__(self, *_: object) -> None: ...

    def forward(self, _, plan) -> torch.Tensor:
        if Broken.faults:
            Broken.faults -= 1
            raise RuntimeError("out of memory")
        return torch.zeros(len(plan.wanted), 4)

    def logits(self, _, hidden) -> torch.Tensor:
        return torch.zeros(len(hidden), 300)


@pytest.fixture
def broken(monkeypatch, qwen3, tmp_path):
    """A scheduler over `Broken`, not started."""
    monkeypatch.setattr(scheduler_module, "Model", Broken)
    return Scheduler(
        spec=dataclasses.replace(read_spec(qwen3), eos_ids=frozenset()),
        weights=SimpleNamespace(embedding=torch.zeros(1, 1)),
        version="base",
        limits=Limits(max_running=4, max_total_tokens=1000, context=1000, max_waiting=3),
        texts=Texts(tmp_path),
        dtype=torch.float32,
    )


def test_a_failed_pass_fails_its_requests_and_the_engine_goes_on(broken):
    ended: list[Request] = []
    options = {"params": Params(max_new_tokens=3), "notify": ended.append}
    first = Request(rid="a", prompt=list(range(40)), **options)
    second = Request(rid="b", prompt=list(range(40)), **options)
    Broken.faults = 1
    broken.submit(first)
    broken.start()
    broken.call(lambda: None).result(timeout=20)
    while not ended:
        broken.call(lambda: None).result(timeout=20)
    broken.submit(second)
    while len(ended) < 2:
        broken.call(lambda: None).result(timeout=20)
    broken.close()
    assert (first.finish.kind, first.finish.status_code) == (FinishKind.ABORT, 500)
    assert "out of memory" in first.finish.message
    assert second.finish.kind is FinishKind.LENGTH
    assert second.cached_tokens == 0


def test_closing_ends_every_request(broken):
    ended: list[Request] = []
    broken.pause(scheduler_module.PauseMode.IN_PLACE)
    broken.submit(Request(rid="a", prompt=[1], params=Params(), notify=ended.append))
    broken.start()
    broken.call(lambda: None).result(timeout=20)
    broken.close()
    assert [r.finish.kind for r in ended] == [FinishKind.ABORT]


async def _submit_until_full(scheduler: Scheduler) -> int:
    intake = Intake(scheduler, seed=0)
    for n in range(10):
        try:
            intake.submit(GenerateBody(input_ids=[1]))
        except QueueFullError:
            return n
    return 10


def test_the_queue_is_bounded(broken):
    import asyncio

    assert asyncio.run(_submit_until_full(broken)) == 3


# ---- folders


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "config.json"),
        ('{"model_type": "llama"}', "num_attention_heads"),
        ('{"model_type": "llama", "attention_bias": true}', "attention_bias"),
        ('{"model_type": "qwen3", "hidden_act": "gelu"}', "gelu"),
    ],
)
def test_a_model_that_cannot_be_computed_is_refused_by_name(tmp_path, text, named):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=named):
        read_spec(tmp_path)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_only_known_position_scalings_are_taken(tmp_path, qwen3, kind):
    import json

    config = json.loads((qwen3 / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": kind, "factor": 4.0, "rope_theta": 100.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kind == "yarn":
        with pytest.raises(ModelError, match="yarn"):
            read_spec(tmp_path)
    else:
        assert (read_spec(tmp_path).rope_factor, read_spec(tmp_path).rope_theta) == (4.0, 100.0)


# ---- shared prefixes


def _asking(prompt: list[int], root: str = "0") -> Request:
    request = Request(rid="x", prompt=prompt, params=Params())
    request.boundaries = boundaries(root, prompt)
    return request


def test_groups_share_their_task_and_the_rest_the_system_prompt():
    system = list(range(320))
    groups = [[_asking([*system, *[100 + g] * 320, i]) for i in range(4)] for g in range(3)]
    singles = [_asking([*system, *[50 + i] * 20]) for i in range(7)]
    stranger = _asking(list(range(2000, 2800)))
    other_weights = _asking([*system, *[100] * 320, 9], root="1")
    chosen = choose_shared([*[r for g in groups for r in g], *singles, stranger, other_weights])
    for group in groups:
        assert {chosen[r][1] for r in group} == {640}
        assert len({chosen[r][0] for r in group}) == 1
    assert {chosen[r][1] for r in singles} == {320}
    assert len({name for name, _ in chosen.values()}) == 4
    assert stranger not in chosen
    assert other_weights not in chosen


def test_many_share_what_all_have_in_common_rather_than_pairs_a_little_more():
    system = list(range(640))
    pairs = [_asking([*system, *[g] * 32, i]) for g in range(8) for i in range(2)]
    chosen = choose_shared(pairs)
    assert {length for _, length in chosen.values()} == {640}
    assert len(chosen) == 16


def test_a_short_common_prefix_is_not_worth_sharing():
    assert choose_shared([_asking([*range(40), i]) for i in range(8)]) == {}


def test_a_shared_prefix_is_never_the_whole_prompt():
    chosen = choose_shared([_asking(list(range(640))) for _ in range(8)])
    assert {length for _, length in chosen.values()} == {624}


# ---- model folders


def test_weights_without_a_generation_config_replace_those_that_have_one(qwen3, qwen3_later, tmp_path):
    served = shutil.copytree(qwen3, tmp_path / "served")
    (served / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 256]}))
    bare = shutil.copytree(qwen3_later, tmp_path / "bare", ignore=shutil.ignore_patterns("generation_config.json"))
    spec = read_spec(served)
    assert spec.eos_ids > read_spec(bare).eos_ids
    assert len(load_weights(bare, spec, torch.float32, torch.device("cpu")).layers) == spec.layers


def test_weights_of_another_model_are_refused_by_what_differs(qwen3, llama):
    with pytest.raises(ModelError, match=r"another model: .*kv_heads"):
        load_weights(llama, read_spec(qwen3), torch.float32, torch.device("cpu"))
