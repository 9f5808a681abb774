"""Runs a function in several processes that form one job, as a launcher would start them."""

import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torchmetrics", "lightning.pytorch", "lightning_egeria"])
# The reference process has a low priority: on a busy machine it starts late, and the other ranks wait for rank 0.
TIMEOUT_S = 300
EXCHANGE_TIMEOUT = timedelta(minutes=4)
# Without an interface gloo asks what the host's name stands for, which may be nothing.
LOCAL = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}


def free_port():
    """A port that no program of this machine uses, as the environment takes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def in_ranks(count, function, *arguments, nodes=1, timeout_s=TIMEOUT_S):
    """What ``function(*arguments)`` returned on each of ``count`` ranks, in their order.

    The ranks stand on so many nodes, as far as Lightning can see. An exception is returned in the place of a result.
    """
    port, processes, ends = free_port(), [], []
    for rank in range(count):
        here, there = PROCESSES.Pipe(duplex=False)
        place = divmod(rank, count // nodes)
        process = PROCESSES.Process(target=_run, args=(there, place, port, function, arguments))
        process.start()
        there.close()
        processes.append(process)
        ends.append(here)
    deadline = time.monotonic() + timeout_s
    try:
        results = []
        for rank, end in enumerate(ends):
            assert end.poll(max(0.1, deadline - time.monotonic())), f"rank {rank} did not end within {timeout_s} s"
            try:
                results.append(pickle.loads(end.recv_bytes()))
            except EOFError:
                results.append(None)  # it was killed
        return results
    finally:
        for process in processes:
            if time.monotonic() > deadline:
                process.kill()
            process.join(10)
            process.kill()
            process.join()
            process.close()
        for end in ends:
            end.close()


def all_well(results):
    """The results, or the first failure raised again."""
    for rank, result in enumerate(results):
        if isinstance(result, Failure):
            raise AssertionError(f"rank {rank}: {result.text}") from result.error
    return results


class Failure:
    """What a rank raised."""

    def __init__(self, error):
        self.text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
            self.error = error
        except Exception:  # an exception that cannot be sent is told of in words
            self.error = RuntimeError(str(error))


def _run(end, place, port, function, arguments):
    node, rank = map(str, place)
    os.environ.update(LOCAL, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK=node, LOCAL_RANK=rank)
    torch.set_num_threads(1)
    try:
        result = function(*arguments)
    except BaseException as error:  # whatever it is, it belongs to the test
        result = Failure(error)
    end.send_bytes(pickle.dumps(result))
    end.close()
    if dist.is_initialized() and not isinstance(result, Failure):
        dist.destroy_process_group()
