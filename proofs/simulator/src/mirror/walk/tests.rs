//! Walks pass, and broken mirrors do not. Long runs are the binary's work.
