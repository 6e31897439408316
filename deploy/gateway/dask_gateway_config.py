"""A Dask Gateway on one machine: dask-gateway-server --config dask_gateway_config.py

Clusters are processes of this machine, under the name of whoever asks, for which the gateway has to run as root. For
Kubernetes, SLURM and others see https://gateway.dask.org; only the backend differs, and nothing for the users.
"""

import os
import sys
from glob import glob

from dask_gateway_server.backends.local import LocalBackend
from dask_gateway_server.options import Float, Options

c = get_config()  # noqa: F821


class Backend(LocalBackend):
    """Hands the right files over to the user; version 2026.3 takes the path of a certificate for a list of letters."""

    def set_file_permissions(self, paths, username):
        folders = [path for path in paths if len(path) > 1]
        certificates = [file for folder in folders for file in glob(os.path.join(folder, ".certs", "*"))]
        super().set_file_permissions(folders + certificates, username)


c.DaskGateway.backend_class = Backend
c.DaskGateway.authenticator_class = "dask_gateway_server.auth.SimpleAuthenticator"
c.SimpleAuthenticator.password = os.environ["GATEWAY_PASSWORD"]

# Who shall come from elsewhere needs another address here, and then the certificate of this machine.
c.Proxy.address = os.environ.get("GATEWAY_ADDRESS", "127.0.0.1:8000")
# c.Proxy.tls_cert = "/etc/ssl/certs/gateway.pem"
# c.Proxy.tls_key = "/etc/ssl/private/gateway.pem"

# The Python that runs the gateway has daskrr too. Workers have one thread each, as daskrr likes them.
c.ClusterConfig.scheduler_cmd = [sys.executable, "-m", "dask", "scheduler"]
c.ClusterConfig.worker_cmd = [sys.executable, "-m", "dask", "worker"]
c.ClusterConfig.worker_cores = 1
c.ClusterConfig.cluster_max_workers = 16
# A client that was killed cannot stop its cluster. The gateway does, some seconds later.
c.ClusterConfig.idle_timeout = 600


def _worker(options):
    return {"worker_memory": f"{options.worker_memory:g} G"}


c.Backend.cluster_options = Options(
    Float("worker_memory", default=4, min=0.5, max=32, label="Memory of a worker (GiB)"), handler=_worker
)
