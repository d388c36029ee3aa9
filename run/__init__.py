"""What puts models, ranks and settings together: `from run import Saguaro`, or its parts. All ranks
run the same lines, and decode rank 0's prompts. That the others only assist was tried: 77 lines
more, and one of some thirty endings failed for a cause that was not found."""
from cli.settings import Settings
from run.decoder import Decoder, main
from run.generate import Saguaro
from run.job import Job

__all__ = ["Decoder", "Job", "Saguaro", "Settings", "main"]
