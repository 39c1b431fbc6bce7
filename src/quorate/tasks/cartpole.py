"""A pole on a cart, kept upright by a policy that learns from its own episodes.

A sample is all the chance of one episode: where it begins, and a number for every choice. The loss plays the episodes
of its batch with the parameters it is given, so a worker that is late has learned from a policy that is no more; in
this, stale gradients of reinforcement differ from others. The pole is that of Barto, Sutton and Anderson (1983) as in
gymnasium's CartPole-v1, but for a whole batch at once.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quorate.errors import BadInput, check_at_least
from quorate.task import Task

MOST_STEPS = 500
_GRAVITY, _CART_MASS, _POLE_MASS, _HALF_LENGTH, _FORCE, _STEP_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_TOTAL_MASS, _MOMENT = _CART_MASS + _POLE_MASS, _POLE_MASS * _HALF_LENGTH
#: How far each part of a state may go.
_FARTHEST = (2.4, math.inf, 12 * 2 * math.pi / 360, math.inf)
#: Seeds of test episodes begin here; a run's own are drawn from all 64 bits.
_TEST_SEED = 1_000_000


def pushed(states: Tensor, right: Tensor) -> Tensor:
    """States [n, 4] (place, speed, angle, its speed) a fiftieth of a second after a push to the right or the left."""
    _, speed, angle, turning = states.unbind(1)
    force = torch.where(right, _FORCE, -_FORCE).to(states.dtype)
    sine, cosine = angle.sin(), angle.cos()
    pushes = (force + _MOMENT * turning.square() * sine) / _TOTAL_MASS
    bend = (_GRAVITY * sine - cosine * pushes) / (
        _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cosine.square() / _TOTAL_MASS)
    )
    change = torch.stack([speed, pushes - _MOMENT * bend * cosine / _TOTAL_MASS, turning, bend], 1)
    return states + _STEP_S * change


def fallen(states: Tensor) -> Tensor:
    """Whether the pole has fallen or the cart has left, [n]."""
    return (states.abs() > states.new_tensor(_FARTHEST)).any(1)


class Chances:
    """A stream of episodes: the seed of one gives 4 + `steps` numbers in 0..1, which are all its chance."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __getitem__(self, seed: int) -> Tensor:
        return torch.rand(4 + self.steps, generator=torch.Generator().manual_seed(seed))


class Played(NamedTuple):
    """Episodes side by side. What an episode holds after its end is left over and counts for nothing."""

    states: Tensor  # [steps, n, 4], before each choice
    right: Tensor  # [steps, n], what was chosen
    lengths: Tensor  # [n], steps until the pole fell or the time was over; the return, too


class Pilot(nn.Module):
    """Scores of left and right, and what is to be expected of a state: [n, 4] to [n, 2] and [n]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        check_at_least("width", width, 1)
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        last = self.actor[-1]
        assert isinstance(last, nn.Linear)
        nn.init.normal_(last.weight, std=0.01)  # so the first choices are even
        nn.init.zeros_(last.bias)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states), self.critic(states)[..., 0]

    def choosing(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """By how much right scores above left is `more + tanh(offset + states @ weight) @ by`."""
        first, last = self.actor[0], self.actor[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        return first.weight.T, first.bias, last.weight[1] - last.weight[0], (last.bias[1] - last.bias[0])[None]


@torch.no_grad()
def play(model: Pilot, chances: Tensor) -> Played:
    """Play an episode for every row of chances [n, 4 + steps], to its end."""
    steps = chances.shape[1] - 4
    states = 0.1 * chances[:, :4] - 0.05
    dice = torch.logit(chances[:, 4:]).T.contiguous()  # a choice is a score above its die
    weight, offset, by, more = model.choosing()
    lengths = torch.ones(len(chances), dtype=torch.int64, device=chances.device)
    standing = torch.ones(len(chances), dtype=torch.bool, device=chances.device)
    seen, chosen = [], []
    for step in range(steps):
        # A few calls a step, since each costs more than its arithmetic.
        right = torch.addmv(more, torch.addmm(offset, states, weight).tanh_(), by) > dice[step]
        seen.append(states)
        chosen.append(right)
        states = pushed(states, right)
        standing.logical_and_(fallen(states).logical_not_())
        lengths += standing
        if not standing.any():
            break
    return Played(torch.stack(seen), torch.stack(chosen), lengths.clamp_(max=steps))


class CartPole(Task):
    """Policy gradient with a learned baseline on CartPole; its measure is the mean "return" of episodes, at most 500.

    lr: of Adam. batch_size: episodes that a worker plays for a gradient.
    discount: what a step later counts. A return is 1 − discount^(steps left), and 1 where the time was over first.
    entropy, value: what the evenness of choices and the baseline's error weigh in the loss.
    steps: an episode has at most. width: of the net. test_episodes: that `evaluate` plays.
    in_gymnasium: whether `evaluate` plays gymnasium's own environment, which is slower (pip install 'quorate[rl]').
    """

    batch_size = 4

    def __init__(
        self,
        *,
        lr: float = 0.01,
        discount: float = 0.99,
        entropy: float = 0.01,
        value: float = 0.5,
        steps: int = MOST_STEPS,
        width: int = 32,
        test_episodes: int = 100,
        in_gymnasium: bool = False,
    ) -> None:
        if not 0 < discount < 1:
            raise BadInput(f"discount is {discount}, but what a step later counts lies between 0 and 1")
        if in_gymnasium:
            check_gymnasium()
        self.lr, self.discount, self.entropy, self.value = lr, discount, entropy, value
        self.steps, self.width = check_at_least("steps", steps, 1), check_at_least("width", width, 1)
        self.test_episodes = check_at_least("test_episodes", test_episodes, 1)
        self.in_gymnasium = in_gymnasium

    def model(self) -> nn.Module:
        return Pilot(self.width)

    def train_data(self) -> Chances:
        return Chances(self.steps)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A number whose gradient is that of the policy; a mean over episodes of sums over their steps, in hundreds."""
        assert isinstance(model, Pilot)
        played = play(model, batch)
        steps = torch.arange(len(played.states), device=batch.device)[:, None]
        counts = steps < played.lengths  # [steps, n]
        scores, expected = model(played.states)
        log_chances = scores.log_softmax(2)
        chosen = torch.where(played.right, log_chances[..., 1], log_chances[..., 0])
        returns = self._returns(played.lengths, steps)
        better = (returns - expected).detach()
        evenness = -(log_chances.exp() * log_chances).sum(2)
        each = -chosen * better - self.entropy * evenness + self.value * (returns - expected).square()
        surrogate: Tensor = (each * counts).sum(0).mean() / 100
        return surrogate

    def _returns(self, lengths: Tensor, steps: Tensor) -> Tensor:
        """[steps, n], as shares of what standing forever would give."""
        left = (lengths - steps).clamp(min=0)
        gained: Tensor = 1.0 - self.discount**left
        return torch.where(lengths == self.steps, 1.0, gained)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=self.lr)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Pilot)
        if self.in_gymnasium:
            returns = play_in_gymnasium(model, self.test_episodes)
            return {"return": sum(returns) / len(returns)}
        device = next(model.parameters()).device
        data = Chances(self.steps)
        chances = torch.stack([data[_TEST_SEED + episode] for episode in range(self.test_episodes)])
        return {"return": float(play(model, chances.to(device)).lengths.float().mean())}


def check_gymnasium() -> None:
    """Say what to install before a long run, not after it."""
    if find_spec("gymnasium") is None:
        raise BadInput("gymnasium is not installed; type: pip install 'quorate[rl]', or leave in_gymnasium out")


@torch.no_grad()
def play_in_gymnasium(model: Pilot, episodes: int) -> list[float]:
    """Returns of episodes in gymnasium's CartPole-v1, with choices drawn as in training."""
    check_gymnasium()
    import gymnasium

    device = next(model.parameters()).device
    returns = []
    environment = gymnasium.make("CartPole-v1")
    for episode in range(episodes):
        state, _ = environment.reset(seed=_TEST_SEED + episode)
        dice = Chances(MOST_STEPS)[_TEST_SEED + episode][4:].tolist()
        total, over = 0.0, False
        while not over:
            scores = model.actor(torch.as_tensor(state, device=device)[None])
            right = functional.softmax(scores[0], 0)[1] > dice[int(total)]
            state, reward, ended, stopped, _ = environment.step(int(right))
            total, over = total + float(reward), ended or stopped
        returns.append(total)
    environment.close()
    return returns
