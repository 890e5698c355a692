"""Kernels that a step launches on an H200, counted in the compiled program: no GPU is needed, but JAX's CUDA packages.

    python benchmarks/kernels.py                          # ours: loops as XLA has them, and as one run has them
    python benchmarks/kernels.py --reference PATH         # and those of a checkout of benchopt/benchmark_bilevel
    python benchmarks/kernels.py --problems cleaning --solvers SABA --list
    python benchmarks/kernels.py --solvers SRBA,SABA --cells 25 10       # of a sweep of so many settings and seeds

Batch 64, float32, T = Q = 10, rows in the shapes of the published problems, of the quadratics 4 096 and 1 024. Of a
`cond` the branch counts where the condition is false: a step without a full-batch pass. Steps are alike where the
kernels that compute in a turn are those of a step by itself, so many times: the bits are then the same, wherever a turn
begins. How products are computed XLA finds out by trying them on the device; without one it takes what it holds for
likely, and on a device they may be other kernels.
"""

import argparse
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import shapes
from beside_reference import AT_ONCE, PERIOD_FRACTIONS, SOLVERS, STEP_SIZES, split
from jax.experimental.topologies import get_topology_desc
from jax.sharding import SingleDeviceSharding
from markdown import number, table
from reference import Reference

import bilevel
from bilevel._precision import arithmetic
from bilevel.engine.gpu_loops import STEPS_PER_TURN, loop_in_turns, unrolled_loop_in_turns
from bilevel.engine.loop import PAGE_AXES, compiler_options_on_cuda, draw_page, initial_state, run_key, take_steps

H200 = """
gpu_device_info {
  name: "NVIDIA H200"
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
  device_address_bits: 64
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
"""
PROBLEMS = {
    "IJCNN1": shapes.logistic_problem,
    "quadratics": partial(shapes.quadratic_problem, n_inner=4_096),
    "cleaning": shapes.cleaning_problem,
}
NO_KERNEL = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "copy-done"}
MOVES = {"parameter", "constant", "bitcast", "broadcast", "copy", "tuple", "dynamic-slice", "slice", "gather"}
OF_NUMBERS = re.compile(r"= (?P<type>f\d+\[[\d,]*\])\S* (?P<name>[\w-]+)\(.*?(?P<axes>dimensions=\{[\d,]*\}|$)")
COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
OPERATION = re.compile(r"^(?:ROOT )?%?[\w.-]+ = (?:\(.*?\)|\S+) (?P<name>[\w-]+)\(")


class Program:
    """A compiled program, by its computations."""

    def __init__(self, text):
        self.computations, self.entry, lines = {}, None, []
        for line in text.splitlines():
            if found := COMPUTATION.match(line):
                lines = self.computations[found["name"]] = []
                self.entry = found["name"] if found["entry"] else self.entry
            elif operation := OPERATION.match(line.strip()):
                lines.append((operation["name"], line.strip()))

    def cost(self, computation):
        """Kernels that a computation launches, and turns of loops that it takes."""
        total = np.zeros(2)
        for name, line in self.computations[computation]:
            if name == "while":
                total += trips(line) * self.turn(line)
            elif name == "conditional":
                total += self.cost(called(line, "false_computation"))
            elif name not in NO_KERNEL:
                total += [1, 0]
        return total

    def turn(self, loop):
        """Cost of one turn of a loop."""
        return self.cost(called(loop, "condition")) + self.cost(called(loop, "body")) + [0, 1]

    def loops_over_steps(self, computation=None):
        """The innermost loops that are not known to turn so many times; where all are known, those of the entry."""
        loops = [line for name, line in self.computations[computation or self.entry] if name == "while"]
        open_ended = [line for line in loops if not trips(line)]
        within = [loop for line in open_ended for loop in self.loops_over_steps(called(line, "body"))]
        return within or open_ended or ([] if computation else loops)

    def cost_of_step(self):
        """Kernels and turns of a step; of two loops one takes several steps in a turn, the other what is left."""
        loops = self.loops_over_steps()
        longest = max(map(self.turn, loops), key=lambda cost: cost[0])
        return longest / (STEPS_PER_TURN if len(loops) > 1 else 1)

    def steps_alike(self):
        """Whether the kernels that compute in a turn of steps are those of a step, so many times."""
        first, *others = sorted((self._arithmetic(called(loop, "body")) for loop in self.loops_over_steps()), key=len)
        return all(other == sorted(first * STEPS_PER_TURN) for other in others)

    def _arithmetic(self, computation):
        """What each kernel computes with numbers, in some order; those that only move them are none."""
        found = []
        for _, line in self.computations[computation]:
            if fused := re.search(r"kind=(\w+), calls=%([\w.-]+)", line):
                operations = [OF_NUMBERS.search(line) for _, line in self.computations.get(fused[2], ())]
                parts = sorted(part.groups() for part in operations if part and part["name"] not in MOVES)
                found += [[fused[1], *parts]] if parts else []
        return sorted(found)

    def kernels_of_turn(self):
        """The lines of the longest loop over steps."""
        body = called(max(self.loops_over_steps(), key=lambda loop: self.turn(loop)[0]), "body")
        lines = [line for name, line in self.computations[body] if name not in NO_KERNEL]
        return [
            re.sub(r", (metadata|backend_config|frontend_attributes|control-predecessors)=.*", "", line)
            for line in lines
        ]


def called(line, role):
    return re.search(rf"{role}=%([\w.-]+)", line)[1]


def trips(loop):
    """How often a loop is known to turn, or 0."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop)
    return int(known[1]) if known else 0


def on_h200(tree, device, lead=()):
    """The shapes of a tree, with axes in front, on the device."""
    place, shapes = SingleDeviceSharding(device), jax.eval_shape(lambda: jax.tree.map(jnp.asarray, tree))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*lead, *leaf.shape), leaf.dtype, sharding=place), shapes)


def our_program(problem, solver, loop, cells, device):
    """The program of one run, or of so many settings and seeds."""
    settings, seeds = ((size,) for size in cells) if cells else ((), ())
    take, place = partial(take_steps, loop=loop), partial(on_h200, device=device)
    if cells:
        take = jax.vmap(take, in_axes=(0, None, 0, None, None, None))
        take = jax.vmap(take, in_axes=(None, None, 0, PAGE_AXES, None, None))
    with arithmetic(problem.dtype):
        oracles = problem.oracles.with_batches(64, "blocks")
        solver = solver.resolve(oracles).cast(problem.dtype)
        state = initial_state(solver, oracles, problem.start)
        page = draw_page(solver, oracles, run_key(0), np.int32(0), 512)
        drawn = place((page.draws, page.calls), lead=seeds)
        page = place(page)._replace(draws=drawn[0], calls=drawn[1])
        state, bounds = place(state, lead=seeds + settings), place((np.int32(0), np.int32(512)))
        traced = jax.jit(take).trace(place(solver, lead=settings), place(oracles), state, page, *bounds)
        program = traced.lower(lowering_platforms=("cuda",)).compile(compiler_options_on_cuda(solver))
        return Program(program.as_text())


def their_program(reference, name, problem, device):
    """The program that a solver of the reference would run, were it not kept from it."""
    take, _ = reference.contender(name, STEP_SIZES[problem], PERIOD_FRACTIONS.get(name), AT_ONCE[problem])
    (solver,), programs = take.args, []

    def lower(*arguments, compiled=solver.one_epoch):
        arguments = [part if isinstance(part, int) else on_h200(part, device) for part in arguments]
        programs.append(compiled.trace(*arguments).lower(lowering_platforms=("cuda",)))
        raise StopIteration

    solver.one_epoch = lower
    with suppress(StopIteration):
        take(1)
    return Program(programs[0].compile().as_text())


def parsed():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, help="a checkout of benchopt/benchmark_bilevel")
    parser.add_argument("--problems", type=split, default=tuple(PROBLEMS), help="names with commas between")
    parser.add_argument("--solvers", type=split, default=SOLVERS, help="names with commas between")
    parser.add_argument("--cells", type=int, nargs=2, metavar=("SETTINGS", "SEEDS"), help="of a sweep, not of one run")
    parser.add_argument("--list", action="store_true", help="print the kernels of the loops over steps, too")
    options = parser.parse_args()
    for option, given, known in (
        ("--problems", options.problems, PROBLEMS),
        ("--solvers", options.solvers, bilevel.SOLVERS),
    ):
        if unknown := ", ".join(name for name in given if name not in known):
            parser.error(f"`{option}`: knows no {unknown}; it takes {', '.join(known)}.")
    return options


def main():
    options = parsed()
    jax.config.update("jax_platforms", "cpu")  # nothing is run
    try:
        (device,) = get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices
    except NotImplementedError:
        raise SystemExit(
            "JAX cannot compile for NVIDIA GPUs here; install its CUDA packages: pip install 'jax[cuda12]'."
        ) from None
    lines = []
    for problem in options.problems:
        built, reference = PROBLEMS[problem](), options.reference and Reference(options.reference, problem)
        for name in options.solvers:
            settings = {"period": 1000} if name in PERIOD_FRACTIONS else {}
            solver = bilevel.SOLVERS[name](STEP_SIZES[problem], 1.0, 64, **settings)
            ours = loop_in_turns if options.cells else unrolled_loop_in_turns
            programs = [our_program(built, solver, loop, options.cells, device) for loop in (jax.lax.fori_loop, ours)]
            if options.list:
                print(*programs[1].kernels_of_turn(), sep="\n")
            if reference:
                programs.append(their_program(reference, name, problem, device))
            costs = [number(part) for program in programs for part in program.cost_of_step()]
            lines.append([problem, name, *costs, "yes" if programs[1].steps_alike() else "no"])
            print(*lines[-1], flush=True)
    columns = ["problem", "solver", "plain loops, kernels", "turns", "ours, kernels", "turns"]
    columns += ["reference, kernels", "turns"] if options.reference else []
    print(table([*columns, "steps alike"], lines))


if __name__ == "__main__":
    main()
