"""What puts models, ranks and settings together: `from run import Saguaro`, or its parts, `Job` and
`Decoder`. Ranks that a launcher has started all run the same lines, and decode rank 0's prompts."""
from cli.settings import Settings
from run.decoder import Decoder, main
from run.generate import Saguaro
from run.job import Job

__all__ = ["Decoder", "Job", "Saguaro", "Settings", "main"]
