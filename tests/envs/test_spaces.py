import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from claw_envs.spaces import UnicodeText, fit


def test_bounds_bytes_not_characters():
    space = UnicodeText(4)
    assert "éé" in space
    assert "ééa" not in space
    assert "日" in space
    assert "" in space


@pytest.mark.parametrize("value", ["\ud800", b"ls", 3, None, ["ls"]])
def test_refuses_what_is_no_text(value):
    assert value not in UnicodeText(100)


def test_equal_by_bound_alone():
    assert UnicodeText(5, seed=1) == UnicodeText(5, seed=2)
    assert UnicodeText(5) != UnicodeText(6)
    assert UnicodeText(5) != spaces.Text(5)
    assert len({UnicodeText(5), UnicodeText(5), UnicodeText(6)}) == 2


def test_samples_are_seeded_members():
    one, two = UnicodeText(64, seed=7), UnicodeText(64, seed=7)
    samples = [one.sample() for _ in range(20)]
    assert samples == [two.sample() for _ in range(20)]
    assert len(set(samples)) > 5
    assert all(text in one for text in samples)


def test_sample_of_a_tiny_space_is_a_member():
    space = UnicodeText(1, seed=0)
    assert all(space.sample() in space for _ in range(20))


def test_sample_refuses_a_mask():
    with pytest.raises(ValueError, match="mask"):
        UnicodeText(5).sample(mask=np.ones(1))


def test_json_round_trip():
    space = UnicodeText(64)
    batch = ["", "a\nb", "日本"]
    assert space.from_jsonable(space.to_jsonable(batch)) == batch


def test_is_not_gymnasiums_text_and_survives_vectorisation():
    def make() -> gymnasium.Env:
        class Echo(gymnasium.Env):
            observation_space = action_space = UnicodeText(64)

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                return "a\né", {}

            def step(self, action):
                return action, 0.0, False, False, {}

        return Echo()

    envs = gymnasium.vector.SyncVectorEnv([make, make])
    assert envs.reset()[0] == ("a\né", "a\né")
    assert envs.step(("x", "日"))[0] == ("x", "日")
    assert not isinstance(UnicodeText(5), spaces.Text)


@given(st.text(st.characters(), max_size=40), st.integers(1, 30))
def test_fit_always_lands_inside(text, size):
    assert fit(text, size) in UnicodeText(size)


def test_fit_keeps_what_fits():
    assert fit("aé", 3) == "aé"
    assert fit("aé", 2) == "a"
    assert fit("\ud800b", 9) == "?b"
