"""An agent with noisy nets on Catch: dqn_zoo's layer, beside a chain on the plain network, five seeds each.

``python -m benchmarks.noisy_agent`` writes ``benchmarks/results/noisy_agent.json``. It took 2 minutes on two cores.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jax import Array

import reparax as rpx

FILE = Path(__file__).parent / "results" / "noisy_agent.json"
ROWS, COLUMNS, HIDDEN, ACTIONS = 10, 5, 50, 3
START = 0.5  # of the standard deviation, times the root of the number of inputs, as in the paper
SEEDS, STEPS, MEMORY, BATCH, DISCOUNT = 5, 20_000, 5_000, 32, 0.99


class Game(NamedTuple):
    """Catch: a ball falls, one row in each step, and a paddle in the last row moves by at most one column."""

    row: Array
    ball: Array
    paddle: Array


def began(key: Array) -> Game:
    """A game with the ball in the first row."""
    return Game(jnp.zeros((), jnp.int32), jax.random.randint(key, (), 0, COLUMNS), jnp.asarray(COLUMNS // 2))


def seen(game: Game) -> Array:
    """The board as the agent sees it."""
    board = jnp.zeros((ROWS, COLUMNS)).at[game.row, game.ball].set(1.0)
    return board.at[ROWS - 1, game.paddle].set(1.0).reshape(-1)


def played(game: Game, action: Array, key: Array) -> tuple[Game, Array, Array]:
    """The next game, the reward, and whether the ball has landed."""
    paddle = jnp.clip(game.paddle + action - 1, 0, COLUMNS - 1)
    moved = Game(game.row + 1, game.ball, paddle)
    done = moved.row == ROWS - 1
    reward = jnp.where(done, jnp.where(moved.ball == paddle, 1.0, -1.0), 0.0)
    return jax.tree.map(lambda a, b: jnp.where(done, a, b), began(key), moved), reward, done


def start(inputs: int) -> Any:
    """The start of means, as in the paper."""
    return hk.initializers.RandomUniform(-(inputs**-0.5), inputs**-0.5)


def plain(x: Array) -> Array:
    """The network without noise."""
    inputs = x.shape[-1]
    x = jax.nn.relu(hk.Linear(HIDDEN, w_init=start(inputs), b_init=start(inputs), name="hidden")(x))
    return hk.Linear(ACTIONS, w_init=start(HIDDEN), b_init=start(HIDDEN), name="out")(x)


def noisy_linear(outputs: int, x: Array) -> Array:
    """``noisy_linear`` of dqn_zoo's ``networks.py``."""

    def root(shape: list[int]) -> Array:
        noise = jax.random.truncated_normal(hk.next_rng_key(), lower=-2.0, upper=2.0, shape=shape)
        return jax.lax.stop_gradient(jnp.sign(noise) * jnp.sqrt(jnp.abs(noise)))

    inputs = x.shape[-1]
    sigma = hk.initializers.Constant(START / inputs**0.5)
    mean = hk.Linear(outputs, w_init=start(inputs), b_init=start(inputs), name="mu")
    spread = hk.Linear(outputs, w_init=sigma, b_init=sigma, name="sigma")
    first, second = root([1, inputs]), root([1, outputs])
    return mean(x) + spread(first * x) * second


def zoo(x: Array) -> Array:
    """The same network with dqn_zoo's layers."""
    return noisy_linear(ACTIONS, jax.nn.relu(noisy_linear(HIDDEN, x)))


NOISE = rpx.Gaussian(START / (ROWS * COLUMNS) ** 0.5, noise="factorized", where="hidden/.*") >> rpx.Gaussian(
    START / HIDDEN**0.5, noise="factorized", where="out/.*"
)
NETWORKS = {
    "dqn_zoo's layer": hk.transform(zoo),
    "a chain": rpx.haiku.parametrized(hk.transform(plain), NOISE),
    "without noise": hk.transform(plain),
}


def run(network: Any, key: Array) -> Array:
    """The mean reward of an episode, in each twentieth of the run. Each act and each term of the loss draws anew."""
    tx = optax.adam(5e-4)
    keys = jax.random.split(key, 3)
    params = network.init(keys[0], jnp.zeros((1, ROWS * COLUMNS)))
    size = ROWS * COLUMNS
    memory = (
        jnp.zeros((MEMORY, size)),
        jnp.zeros(MEMORY, jnp.int32),
        jnp.zeros(MEMORY),
        jnp.zeros(MEMORY),
        jnp.zeros((MEMORY, size)),
    )

    def loss(params: Any, target: Any, batch: Any, key: Array) -> Array:
        x, action, reward, discount, following = batch
        first, second, third = jax.random.split(key, 3)
        value = jnp.take_along_axis(network.apply(params, first, x), action[:, None], 1)[:, 0]
        best = jnp.argmax(network.apply(params, second, following), axis=-1)
        after = jnp.take_along_axis(network.apply(target, third, following), best[:, None], 1)[:, 0]
        return jnp.mean((value - jax.lax.stop_gradient(reward + discount * after)) ** 2)

    def step(carry: Any, inputs: Any) -> Any:
        params, target, state, memory, game = carry
        count, key = inputs
        act, new, choose, learn = jax.random.split(key, 4)
        x = seen(game)
        action = jnp.argmax(network.apply(params, act, x[None])[0])  # a new draw for each act
        game, reward, done = played(game, action, new)
        item = (x, action, reward, jnp.where(done, 0.0, DISCOUNT), seen(game))
        memory = jax.tree.map(lambda held, one: held.at[count % MEMORY].set(one), memory, item)
        rows = jax.random.randint(choose, (BATCH,), 0, jnp.clip(count + 1, 1, MEMORY))
        batch = jax.tree.map(lambda held: held[rows], memory)
        updates, state = tx.update(jax.grad(loss)(params, target, batch, learn), state, params)
        params = optax.apply_updates(params, updates)
        target = jax.tree.map(lambda a, b: jnp.where(count % 200 == 0, a, b), params, target)
        return (params, target, state, memory, game), (reward, done)

    carry = (params, params, tx.init(params), memory, began(keys[1]))
    _, (rewards, ends) = jax.lax.scan(step, carry, (jnp.arange(STEPS), jax.random.split(keys[2], STEPS)))
    return rewards.reshape(20, -1).sum(axis=1) / ends.reshape(20, -1).sum(axis=1)


def main() -> None:
    """Runs all networks, and writes the file."""
    found = {}
    for name, network in NETWORKS.items():
        results = jax.jit(jax.vmap(lambda key, network=network: run(network, key)))(
            jax.random.split(jax.random.key(0), SEEDS)
        )
        found[name] = [[round(float(x), 4) for x in row] for row in results]
        print(name, [row[-1] for row in found[name]])
    FILE.write_text(json.dumps({"steps": STEPS, "rewards": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
