"""The last hour, sampled by the node itself: throughput, lag, dirty ratios."""
