//! Tests of the host over sockets, in one binary: every further binary would have to be linked with everything again.

mod common;
mod connections;
mod coverage;
mod expectations;
mod extensions;
mod formats;
mod fused;
mod hostile;
mod one_pass;
mod timeouts;
mod wire;
