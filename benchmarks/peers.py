"""The other systems, each behind the same three calls; one that is not installed says so and is left out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

WORKERS = 2


class Peer:
    """What the benchmarks ask of another system."""

    name = ""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        raise NotImplementedError

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        raise NotImplementedError

    def put(self, value: Any) -> Any:
        """Declare an object beforehand, where the system has a way; else the object itself."""
        return value


class Futures(Peer):
    name = "concurrent.futures"

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        self.pool = pool

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.pool.submit(function, *args).result()

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        return list(self.pool.map(function, items))


class Joblib(Peer):
    name = "joblib"

    def __init__(self, parallel: Any, delayed: Any) -> None:
        self._parallel, self._delayed = parallel, delayed

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._parallel([self._delayed(function)(*args)])[0]

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        return list(self._parallel(self._delayed(function)(item) for item in items))


class Dask(Peer):
    name = "dask.distributed"

    def __init__(self, client: Any) -> None:
        self._client = client

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._client.submit(function, *args, pure=False).result()

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        return list(self._client.gather(self._client.map(function, list(items), pure=False)))

    def put(self, value: Any) -> Any:
        return self._client.scatter(value, broadcast=True, hash=False)


class Ray(Peer):
    name = "ray"

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._remote: dict[Any, Any] = {}

    def _function(self, function: Callable[..., Any]) -> Any:
        if function not in self._remote:
            self._remote[function] = self._ray.remote(function)
        return self._remote[function]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._ray.get(self._function(function).remote(*args))

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> list[Any]:
        remote = self._function(function)
        return list(self._ray.get([remote.remote(item) for item in items]))

    def put(self, value: Any) -> Any:
        return self._ray.put(value)


@contextlib.contextmanager
def futures() -> Iterator[Peer]:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=context) as pool:
        yield Futures(pool)


@contextlib.contextmanager
def joblib() -> Iterator[Peer]:
    from joblib import Parallel, delayed

    with Parallel(n_jobs=WORKERS) as parallel:
        yield Joblib(parallel, delayed)


@contextlib.contextmanager
def dask() -> Iterator[Peer]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=1, dashboard_address=None, silence_logs=50
        ) as cluster,
        Client(cluster) as client,
    ):
        yield Dask(client)


@contextlib.contextmanager
def ray() -> Iterator[Peer]:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray as package

    package.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=3_000_000_000,
    )
    try:
        yield Ray(package)
    finally:
        package.shutdown()


EVERY = {"concurrent.futures": futures, "joblib": joblib, "dask.distributed": dask, "ray": ray}


def each(names: Iterable[str], say: Callable[[str], None]) -> Iterator[tuple[str, Peer]]:
    """Start the peers that are installed, one after the other; say which are not."""
    for name in names:
        with contextlib.ExitStack() as stack:
            try:
                peer = stack.enter_context(EVERY[name]())
            except ImportError as error:
                say(f"  {name}: not installed ({error.name or error}), left out")
                continue
            except Exception as error:  # a peer that does not start here must not stop the others
                say(f"  {name}: does not start here ({type(error).__name__}: {error}), left out")
                continue
            yield name, peer
