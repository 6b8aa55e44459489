//! Tests of the client over sockets, in one binary: every further binary would have to be linked with everything again.

mod common;
mod hostile;
mod requests;
mod stock;
mod unix;
