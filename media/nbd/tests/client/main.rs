//! Tests of the client over sockets, in one binary: each further one would be linked anew with everything.

mod common;
mod hostile;
mod requests;
mod stock;
mod unix;
