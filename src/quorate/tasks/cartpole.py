"""CartPole: reinforcement learning of a policy that balances a pole on a cart.

A sample holds all random numbers of one episode: its start and one number per action. The loss plays the episodes of
its batch with the parameters it is given. So the gradient of a late worker comes from episodes of an old policy, which
makes stale gradients in reinforcement learning different from others. The physics is that of Barto, Sutton and Anderson
(1983) as in gymnasium's CartPole-v1, for a whole batch at once.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quorate.errors import BadInput, check_at_least, install_line
from quorate.task import Task

MOST_STEPS = 500
_GRAVITY, _CART_MASS, _POLE_MASS, _HALF_LENGTH, _FORCE, _STEP_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
_TOTAL_MASS, _MOMENT = _CART_MASS + _POLE_MASS, _POLE_MASS * _HALF_LENGTH
#: Largest absolute value of each part of a state.
_LIMITS = (2.4, math.inf, 12 * 2 * math.pi / 360, math.inf)
#: First seed of the test episodes; seeds of training episodes are drawn from all 64 bits.
_TEST_SEED = 1_000_000


def next_states(states: Tensor, right: Tensor) -> Tensor:
    """States [n, 4] (position, speed, angle, angular speed) 0.02 s after a push to the right or the left."""
    _, speed, angle, turning = states.unbind(1)
    force = torch.where(right, _FORCE, -_FORCE).to(states.dtype)
    sine, cosine = angle.sin(), angle.cos()
    pushes = (force + _MOMENT * turning.square() * sine) / _TOTAL_MASS
    bend = (_GRAVITY * sine - cosine * pushes) / (
        _HALF_LENGTH * (4.0 / 3.0 - _POLE_MASS * cosine.square() / _TOTAL_MASS)
    )
    change = torch.stack([speed, pushes - _MOMENT * bend * cosine / _TOTAL_MASS, turning, bend], 1)
    return states + _STEP_S * change


def has_fallen(states: Tensor) -> Tensor:
    """Whether the pole has fallen or the cart has left the track, [n]."""
    return (states.abs() > states.new_tensor(_LIMITS)).any(1)


class RandomEpisodes:
    """A stream of episodes: a seed gives 4 + `steps` numbers in 0..1, which are all random numbers of its episode."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __getitem__(self, seed: int) -> Tensor:
        return torch.rand(4 + self.steps, generator=torch.Generator().manual_seed(seed))


class Episodes(NamedTuple):
    """A batch of episodes. Entries after the end of an episode are meaningless."""

    states: Tensor  # [steps, n, 4], before each action
    right: Tensor  # [steps, n], the actions
    lengths: Tensor  # [n], steps until the pole fell or the time was over; also the return


class ActorCritic(nn.Module):
    """Scores of left and right, and the value of a state: [n, 4] to [n, 2] and [n]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        check_at_least("width", width, 1)
        self.actor = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.critic = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        last = self.actor[-1]
        assert isinstance(last, nn.Linear)
        nn.init.normal_(last.weight, std=0.01)  # so that both actions are equally likely at first
        nn.init.zeros_(last.bias)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states), self.critic(states)[..., 0]

    def score_weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(weight, offset, by, more): right scores `more + tanh(offset + states @ weight) @ by` above left."""
        first, last = self.actor[0], self.actor[2]
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        return first.weight.T, first.bias, last.weight[1] - last.weight[0], (last.bias[1] - last.bias[0])[None]


@torch.no_grad()
def play(model: ActorCritic, draws: Tensor) -> Episodes:
    """Play an episode to its end for every row of draws [n, 4 + steps]."""
    steps = draws.shape[1] - 4
    states = 0.1 * draws[:, :4] - 0.05
    thresholds = torch.logit(draws[:, 4:]).T.contiguous()  # the action is right if its score is above the threshold
    weight, offset, by, more = model.score_weights()
    lengths = torch.ones(len(draws), dtype=torch.int64, device=draws.device)
    standing = torch.ones(len(draws), dtype=torch.bool, device=draws.device)
    seen, chosen = [], []
    for step in range(steps):
        # As few calls per step as possible, since a call costs more than its arithmetic.
        right = torch.addmv(more, torch.addmm(offset, states, weight).tanh_(), by) > thresholds[step]
        seen.append(states)
        chosen.append(right)
        states = next_states(states, right)
        standing.logical_and_(has_fallen(states).logical_not_())
        lengths += standing
        if not standing.any():
            break
    return Episodes(torch.stack(seen), torch.stack(chosen), lengths.clamp_(max=steps))


class CartPole(Task):
    """Policy gradient with a learned baseline on CartPole, measured by the mean "return" of episodes, at most 500.

    lr: of Adam. batch_size: episodes per gradient.
    discount: per step. A return is 1 − discount^(steps left), and 1 if the episode reached the step limit.
    entropy, value: weights of the policy's entropy and of the baseline's error in the loss.
    steps: step limit of an episode. width: of the net. test_episodes: number of episodes in `evaluate`.
    in_gymnasium: let `evaluate` use gymnasium's own environment, which is slower (pip install 'quorate[rl]').
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
        return ActorCritic(self.width)

    def train_data(self) -> RandomEpisodes:
        return RandomEpisodes(self.steps)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """A surrogate with the policy's gradient: the mean over episodes of the sum over steps, divided by 100."""
        assert isinstance(model, ActorCritic)
        played = play(model, batch)
        steps = torch.arange(len(played.states), device=batch.device)[:, None]
        counts = steps < played.lengths  # [steps, n]
        scores, expected = model(played.states)
        log_probabilities = scores.log_softmax(2)
        chosen = torch.where(played.right, log_probabilities[..., 1], log_probabilities[..., 0])
        returns = self._returns(played.lengths, steps)
        better = (returns - expected).detach()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(2)
        each = -chosen * better - self.entropy * entropy + self.value * (returns - expected).square()
        surrogate: Tensor = (each * counts).sum(0).mean() / 100
        return surrogate

    def _returns(self, lengths: Tensor, steps: Tensor) -> Tensor:
        """Discounted returns [steps, n], as shares of the return of an endless episode."""
        left = (lengths - steps).clamp(min=0)
        gained: Tensor = 1.0 - self.discount**left
        return torch.where(lengths == self.steps, 1.0, gained)

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=self.lr)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, ActorCritic)
        if self.in_gymnasium:
            returns = play_in_gymnasium(model, self.test_episodes)
            return {"return": sum(returns) / len(returns)}
        device = next(model.parameters()).device
        data = RandomEpisodes(self.steps)
        draws = torch.stack([data[_TEST_SEED + episode] for episode in range(self.test_episodes)])
        return {"return": float(play(model, draws.to(device)).lengths.float().mean())}


def check_gymnasium() -> None:
    """Refuse before a long run, not after it, if gymnasium is missing."""
    if find_spec("gymnasium") is None:
        raise BadInput(f"gymnasium is not installed; type: {install_line('rl')}, or leave in_gymnasium out")


@torch.no_grad()
def play_in_gymnasium(model: ActorCritic, episodes: int) -> list[float]:
    """Returns of episodes in gymnasium's CartPole-v1, with actions drawn as in training."""
    check_gymnasium()
    import gymnasium

    device = next(model.parameters()).device
    returns = []
    environment = gymnasium.make("CartPole-v1")
    for episode in range(episodes):
        state, _ = environment.reset(seed=_TEST_SEED + episode)
        thresholds = RandomEpisodes(MOST_STEPS)[_TEST_SEED + episode][4:].tolist()
        total, over = 0.0, False
        while not over:
            scores = model.actor(torch.as_tensor(state, device=device)[None])
            right = functional.softmax(scores[0], 0)[1] > thresholds[int(total)]
            state, reward, ended, stopped, _ = environment.step(int(right))
            total, over = total + float(reward), ended or stopped
        returns.append(total)
    environment.close()
    return returns
