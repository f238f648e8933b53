"""From a gradtrace configuration to a verl job that is started, watched and restarted."""
