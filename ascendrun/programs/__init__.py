"""The bundled training programs; ascendrun passes information to them only in environment variables."""
