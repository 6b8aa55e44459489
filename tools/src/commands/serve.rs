//! `sealblock serve`: targets for other hosts, over NVMe/TCP.
//!
//! A plan says what is to be served ([`plan`]); it is made from the command line before anything is opened. The server
//! ([`server`]) opens all of it or nothing, serves until a signal comes, and leaves every volume clean.

mod announce;
mod embedded;
mod identity;
mod notify;
mod plan;
mod server;

use std::io::{self, Write};

use sealblock_runtime_reactor::{Config, Reactor};

use crate::cli::Serve;
use crate::exit::{Cause, Exit, Failure};
use announce::Announcer;
use plan::Plan;

/// Serves.
pub fn run(arguments: &Serve) -> Result<Exit, Failure> {
    if let Some(address) = arguments.nbd {
        return Err(Failure::new(Cause::Absent, "listening for NBD clients", "NBD is not part of this version")
            .on(address)
            .advise("--listen ADDR:PORT, for NVMe/TCP"));
    }
    let plan = plan(arguments)?;
    plan.check()?;
    if plan.is_open() {
        let warning = "sealblock: every host that reaches this address may connect, and nothing proves who it is; \
             --allow-host names those that may, which keeps out mistakes but no attackers";
        // Who closed standard error has chosen not to be warned.
        writeln!(io::stderr(), "{warning}").ok();
    }
    let reactor = Reactor::new(Config::default())
        .map_err(|error| Failure::new(Cause::Io, "starting", error).advise("SEALBLOCK_RUNTIME=syscalls"))?;
    reactor.block_on(server::run(&plan, &Announcer::new(arguments.json)))
}

fn plan(arguments: &Serve) -> Result<Plan, Failure> {
    if !arguments.targets.is_empty() {
        return Ok(Plan::of_targets(arguments, &arguments.targets));
    }
    Ok(Plan::of_targets(arguments, &[embedded::volume()?]))
}
