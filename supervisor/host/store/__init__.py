"""What is kept in files: state, responses, pictures, bodies; files that processes share."""
