"""Audio files to samples, samples to audio files, and transcripts in the formats of the API. Needs PyAV and NumPy."""
