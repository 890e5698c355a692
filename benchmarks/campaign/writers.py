"""Several writers at once.

Commands that fill one store at the same time. In the end each cell is there once.
"""

import random
import time

from benchmarks.campaign import workshop
from benchmarks.campaign.table import Counter


def rows(seed, quick):
    rng = random.Random(seed)
    if quick:
        return [kill_one_of_three(1, rng)]
    return [write_together(2, 6, rng), write_together(3, 6, rng), kill_one_of_three(6, rng)]


def write_together(n_writers, n_times, rng):
    name = {2: "two", 3: "three"}[n_writers]
    counter = Counter(f"{name} writers of one store", "the same `bilevel run`, at once")
    for _ in range(n_times):
        folder = workshop.new_folder("writers")
        with counter.case(folder.name):
            processes = start(n_writers, folder, rng)
            for process in processes:
                process.end()
            workshop.check_finished(folder)
    return counter.row()


def kill_one_of_three(n_times, rng):
    counter = Counter("three writers, one killed", "one gets SIGKILL at a random moment, two go on")
    for _ in range(n_times):
        folder = workshop.new_folder("writers")
        with counter.case(folder.name):
            processes = start(3, folder, rng)
            time.sleep(rng.uniform(0.5, 1.5) * workshop.undisturbed()[1])
            processes[0].kill_all()
            for process in processes[1:]:
                process.end()
            workshop.finish(folder)  # which also removes what the killed one was writing
    return counter.row()


def start(n_writers, folder, rng):
    processes = []
    for _ in range(n_writers):
        processes.append(workshop.start_run(folder))
        time.sleep(rng.uniform(0.0, 0.3))
    return processes
