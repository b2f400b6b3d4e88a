"""The worker for speech recognition: one class for each family of models, behind the endpoints of `kit.transcription`."""
