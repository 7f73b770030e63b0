"""The supervisor: starts and watches the ranks of one attempt; outlives the connection."""
