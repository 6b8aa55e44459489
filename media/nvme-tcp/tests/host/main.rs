//! Tests of the host over sockets, in one binary: each further one would be linked anew with everything.

mod common;
mod connections;
mod coverage;
mod extensions;
mod formats;
mod fused;
mod hostile;
mod one_pass;
mod timeouts;
mod wire;
