"""An S3-compatible store in memory with one bucket, named by the environment. It believes any credentials."""

import os

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(os.environ["BUCKET"], "us-east-1")
# One request at a time: served by threads, two conditional requests may both find their condition met.
run_simple("0.0.0.0", 9000, DomainDispatcherApplication(create_backend_app), request_handler=MotoRequestHandler)
