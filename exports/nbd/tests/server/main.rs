//! Tests of the server over sockets, in one binary: each further one would be linked anew with everything.

mod change;
mod common;
mod damage;
mod ending;
mod libnbd;
mod long_requests;
mod long_writes;
mod parts;
mod requests;
mod stock;
