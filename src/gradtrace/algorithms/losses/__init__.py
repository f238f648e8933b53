"""Policy losses, one to a file, and the critic's. Importing this package registers the policy losses."""

from gradtrace.algorithms.losses import ppo as ppo
