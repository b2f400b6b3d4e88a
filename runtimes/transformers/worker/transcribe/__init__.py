"""The worker for speech recognition: a class for each family of models, behind the endpoints of `sdk.transcription`."""
