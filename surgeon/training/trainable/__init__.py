"""The parameters that train in a loaded model: exactly the wanted ones, which are set and checked here."""
