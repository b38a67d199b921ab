"""The modules that models are made of; every operation goes through the platform's ops, given when a module is built."""
