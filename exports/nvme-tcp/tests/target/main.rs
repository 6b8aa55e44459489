//! Tests of the target over sockets, in one binary, because each additional one would have to be linked with
//! everything.

mod async_events;
mod blocks;
mod changes;
mod common;
mod controllers;
mod copy;
mod cores;
mod damage;
mod expectations;
mod extensions;
mod fused;
mod late;
mod one_device;
mod placement;
mod read_only;
mod resize;
mod shutdown;
mod strangers;
mod unread;
