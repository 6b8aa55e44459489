//! Tests of the server over sockets, in one binary, because each additional one would have to be linked with
//! everything.

mod change;
mod common;
mod damage;
mod ending;
mod libnbd;
mod long_requests;
mod long_writes;
mod parts;
mod placement;
mod requests;
mod stock;
