"""What puts models, ranks and settings together. From Python: `from run import Decoder, ...`."""
from cli.settings import Settings
from run.decoder import Decoder, main
from run.job import Job

__all__ = ["Decoder", "Job", "Settings", "main"]
