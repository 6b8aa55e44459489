//! Conformance: what hosts that are not ours do with what sealblock serves.
//!
//! Stock Linux kernels run under QEMU ([`harness`]), connect to `sealblock serve` on this machine, and do what hosts do
//! ([`suite`]). The same program is in the guests ([`guest`]) and carries out there what no other program does.
//!
//! A test is a function that goes back and forth between the two sides: it serves a volume, has the guest use it, damages it
//! or kills the server, and looks at the guest again.

pub mod context;
pub mod guest;
pub mod harness;
pub mod runner;
pub mod served;
pub mod suite;
