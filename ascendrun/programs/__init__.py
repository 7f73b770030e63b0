"""The bundled training programs; they know ascendrun only by the environment it gives them."""
