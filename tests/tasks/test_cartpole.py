"""The pole on a cart: the same as gymnasium's step by step, and a policy that learns to hold it."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

import quorate
from quorate.task import load_task
from quorate.tasks import cartpole
from quorate.tasks.cartpole import ActorCritic, CartPole, RandomEpisodes, has_fallen, next_states, play


def pilot(seed: int = 0) -> ActorCritic:
    torch.manual_seed(seed)
    return ActorCritic(8)


@pytest.fixture
def quiet_pygame(monkeypatch: pytest.MonkeyPatch) -> None:
    """gymnasium sets this variable when it is first used, and leaves it behind."""
    monkeypatch.setenv("PYGAME_HIDE_SUPPORT_PROMPT", "hide")


@pytest.mark.usefixtures("quiet_pygame")
def test_the_pole_moves_as_gymnasiums() -> None:
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed; pip install '.[rl]'")
    environment = gymnasium.make("CartPole-v1").unwrapped
    choices = torch.Generator().manual_seed(1)
    for episode in range(5):
        environment.reset(seed=episode)
        states = torch.tensor([list(environment.state)], dtype=torch.float64)
        for _ in range(200):
            right = torch.rand(1, generator=choices) < 0.5
            _, reward, ended, _, _ = environment.step(int(right))
            states = next_states(states, right)
            assert reward == 1.0
            assert states[0].tolist() == pytest.approx(list(environment.state), abs=1e-9)
            assert bool(has_fallen(states)) == ended
            if ended:
                break
        assert ended
    environment.close()


@pytest.mark.usefixtures("quiet_pygame")
def test_both_ways_of_playing_have_the_same_returns_on_average() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed; pip install '.[rl]'")
    model = pilot()
    ours = CartPole(test_episodes=200, width=8).evaluate(model)["return"]
    theirs = CartPole(test_episodes=60, width=8, in_gymnasium=True).evaluate(model)["return"]
    assert 15 < ours < 30  # even choices keep it up for some 22 steps
    assert theirs == pytest.approx(ours, rel=0.25)


def test_an_episode_depends_on_its_own_chance_alone() -> None:
    data, model = RandomEpisodes(60), pilot()
    draws = torch.stack([data[seed] for seed in (3, 4, 5, 2**63 - 1)])
    together = play(model, draws)
    assert torch.equal(data[4], draws[1])
    for episode, chance in enumerate(draws):
        alone = play(model, chance[None])
        assert alone.lengths[0] == together.lengths[episode]
        length = int(alone.lengths[0])
        torch.testing.assert_close(alone.states[:length, 0], together.states[:length, episode])
    assert len(set(together.lengths.tolist())) > 1


def test_choices_follow_the_scores() -> None:
    model = pilot()
    with torch.no_grad():
        model.actor[-1].weight.zero_()
        model.actor[-1].bias.copy_(torch.tensor([0.0, math.log(3.0)]))  # right three times out of four
    data = RandomEpisodes(8)
    right = play(model, torch.stack([data[seed] for seed in range(400)])).right.float()
    assert float(right.mean()) == pytest.approx(0.75, abs=0.03)


def test_returns_count_what_is_left() -> None:
    task = CartPole(discount=0.5, steps=4)
    found = task._returns(torch.tensor([2, 4]), torch.arange(4)[:, None])
    assert found.tolist() == [[0.75, 1.0], [0.5, 1.0], [0.0, 1.0], [0.0, 1.0]]


def test_the_gradient_is_that_of_the_policy() -> None:
    """Σ log π · (return − baseline) over the steps that were played, by a plain loop."""
    task = CartPole(steps=30, width=8, entropy=0.0, value=0.0)
    model = pilot()
    batch = torch.stack([RandomEpisodes(30)[seed] for seed in range(3)])
    task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad.clone() for parameter in model.actor.parameters()]  # type: ignore[union-attr]
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.critic.parameters())
    model.zero_grad()
    total = torch.zeros(())
    for chance in batch:
        played = play(model, chance[None])
        length = int(played.lengths[0])
        for step in range(length):
            scores, expected = model(played.states[step])
            gain = 1 - 0.99 ** (length - step) if length < 30 else 1.0
            chosen = scores[0].log_softmax(0)[int(played.right[step, 0])]
            total = total - chosen * (gain - expected[0].detach())
    (total / 3 / 100).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, [parameter.grad for parameter in model.actor.parameters()])


def test_it_learns_to_hold_the_pole() -> None:
    task = CartPole(lr=0.02, steps=100, test_episodes=20, width=16)
    engine = quorate.Simulated(4, "shifted-exp:1,1", together=True)
    result = quorate.train(task, quorate.BackupSync(3, 1), engine, updates=40, evaluate_every=39)
    returns = [one.measures["return"] for one in result.metrics.evaluations]
    assert returns[-1] > 60


def test_it_runs_on_local_workers() -> None:
    task = CartPole(steps=20, test_episodes=3, width=4)
    result = quorate.train(task, quorate.Async(), quorate.Local(2), updates=3)
    assert 1 <= result.evaluation["return"] <= 20


def test_equal_seeds_give_equal_runs_on_both_arithmetics() -> None:
    task = CartPole(steps=20, test_episodes=3, width=4)
    engines = [quorate.Simulated(3, together=together) for together in (False, False, True)]
    results = [quorate.train(task, quorate.FullSync(), engine, updates=4, seed=5) for engine in engines]
    assert results[0].digest == results[1].digest
    assert results[2].metrics.header["engine"]["arithmetic"].startswith("together")
    for name, parameter in results[0].parameters.items():
        torch.testing.assert_close(results[2].parameters[name], parameter)


def test_without_gymnasium_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cartpole, "find_spec", lambda name: None)
    CartPole()
    with pytest.raises(quorate.BadInput, match=r"type: pip install 'quorate\[rl\]'"):
        CartPole(in_gymnasium=True)
    assert importlib.util.find_spec is not cartpole.find_spec


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"discount": 1.0}, "discount is 1.0, but what a step later counts lies between 0 and 1"),
        ({"steps": 0}, "steps is 0, but it must be at least 1"),
        ({"test_episodes": 0}, "test_episodes is 0, but it must be at least 1"),
    ],
)
def test_bad_input(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(quorate.BadInput, match=sentence):
        CartPole(**options)


def test_a_ready_task() -> None:
    assert isinstance(load_task("cartpole"), CartPole)
