//! The verify of several targets: side by side where they share no device, else one after the other.
//!
//! Two sequential readers of one disk make it seek between them, and both end later than if they took turns. So targets that
//! share a device form a queue; queues run side by side, each on a thread of its own, [`MAX_QUEUES`] at most.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use sealblock_stack::kernel::DeviceNumber;
use sealblock_stack::kernel::below::disks_under;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError};
use serde::Serialize;

use super::job::VerifyRequest;
use super::target;
use crate::cli::Verify;
use crate::exit::{Exit, status};
use crate::interrupt;
use crate::report::print_json;

/// Max. targets that are verified at once: each has threads and buffers of its own on every core.
const MAX_QUEUES: usize = 8;

/// What `--json` prints of a target that could not be verified.
#[derive(Serialize)]
struct NotVerified {
    target: String,
    error: String,
}

/// Checks all targets; returns the worst result. Failures are printed here.
pub(super) fn run(arguments: &Verify) -> Result<Exit, StackError> {
    refuse_options_of_one(arguments)?;
    let queues = queues(&arguments.targets, places);
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let work = || {
        while let Some(queue) = queues.get(next.fetch_add(1, Ordering::Relaxed)) {
            for target in queue {
                let result = one(VerifyRequest { arguments, target });
                results.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(result);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..queues.len().min(MAX_QUEUES) {
            scope.spawn(work);
        }
        work();
    });
    worst(results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// Refuses what is meant for one target.
fn refuse_options_of_one(arguments: &Verify) -> Result<(), StackError> {
    let why = match (&arguments.accept_stale, &arguments.resume) {
        (Some(_), _) => "--accept-stale needs a single target",
        (None, Some(_)) => "--resume needs a single target",
        (None, None) => return Ok(()),
    };
    Err(StackError::new(Cause::Usage, "verify", why).advise("verify each target separately"))
}

/// Verifies a target of several, and prints why it could not be.
fn one(order: VerifyRequest<'_>) -> Result<Exit, StackError> {
    let result = if interrupt::came() {
        Err(StackError::new(Cause::Io, "verify", "interrupted before it started").on(order.target))
    } else {
        target::run(order)
    };
    let Err(failure) = result else { return result };
    if failure.is_unreported() {
        // Where standard error is closed, the exit status has to do.
        writeln!(io::stderr(), "{failure}").ok();
    }
    if order.arguments.json {
        print_json(&NotVerified { target: order.target.to_string(), error: failure.in_short() })?;
    }
    if interrupt::came() { Ok(Exit::Interrupted) } else { Err(failure.reported()) }
}

/// The result that counts, as the help of the command has it.
fn worst(results: Vec<Result<Exit, StackError>>) -> Result<Exit, StackError> {
    let rank = |result: &Result<Exit, StackError>| match result {
        Ok(Exit::Clean) => 0,
        Ok(Exit::Incomplete) => 1,
        Err(failure) if status(failure.cause()) == 2 => 2,
        Err(_) => 3,
        Ok(Exit::DamageFound) => 4,
        // The work did not end: the process ends by the signal.
        Ok(Exit::Interrupted) => 5,
    };
    results.into_iter().max_by_key(rank).unwrap_or(Ok(Exit::Clean))
}

/// The targets in queues: targets that share a place are in the same one, in the order in which they were named.
fn queues<P: Ord>(targets: &[TargetName], places: impl Fn(&TargetName) -> Vec<P>) -> Vec<Vec<&TargetName>> {
    let mut queue_of: Vec<usize> = (0..targets.len()).collect();
    let mut first_at = BTreeMap::new();
    for (number, target) in targets.iter().enumerate() {
        for place in places(target) {
            let other = queue_of[*first_at.entry(place).or_insert(number)];
            let (from, to) = (queue_of[number].max(other), queue_of[number].min(other));
            queue_of.iter_mut().filter(|queue| **queue == from).for_each(|queue| *queue = to);
        }
    }
    let mut queues: BTreeMap<usize, Vec<&TargetName>> = BTreeMap::new();
    for (target, queue) in targets.iter().zip(queue_of) {
        queues.entry(queue).or_default().push(target);
    }
    queues.into_values().collect()
}

/// Where a target's blocks lie.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Place {
    /// A device of this machine, or the file system that a file is on.
    Device(DeviceNumber),
    /// A server.
    Host(String),
}

fn places(target: &TargetName) -> Vec<Place> {
    let each = target.leaves().into_iter().flat_map(|leaf| match leaf {
        TargetName::NvmeTcp { address, .. } => vec![Place::Host(address.to_string())],
        TargetName::Nbd { address, .. } => vec![Place::Host(address.uri(""))],
        leaf => leaf.path().map(devices_of).unwrap_or_default(),
    });
    each.collect()
}

/// The disks at the bottom; where they are not known, the file system. What cannot be opened has no place; its verify says so.
fn devices_of(path: &Path) -> Vec<Place> {
    match disks_under(path) {
        Ok(disks) => disks.into_iter().map(Place::Device).collect(),
        Err(_) => fs::metadata(path).map(|about| Place::Device(DeviceNumber::of(&about))).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(cause: Cause) -> Result<Exit, StackError> {
        Err(StackError::new(cause, "verify", "it is offline"))
    }

    #[test]
    fn damage_counts_more_than_what_could_not_be_done_and_that_more_than_what_is_incomplete() {
        let order = [
            Ok(Exit::Clean),
            Ok(Exit::Incomplete),
            failed(Cause::Usage),
            failed(Cause::Unreachable),
            Ok(Exit::DamageFound),
            Ok(Exit::Interrupted),
        ];
        for at in 0..order.len() {
            let mut results = order[..=at].to_vec();
            assert_eq!(worst(results.clone()), order[at]);
            results.reverse();
            assert_eq!(worst(results), order[at]);
        }
    }

    #[test]
    fn targets_that_share_a_device_are_in_one_queue_also_by_way_of_another_target() {
        let targets: Vec<TargetName> = ["1a", "2b", "3c", "4ab", "5d", "6"].map(|name| name.parse().unwrap()).to_vec();
        let letters = |target: &TargetName| target.to_string().chars().skip(1).collect::<Vec<char>>();
        let named = |targets: &[TargetName]| -> Vec<Vec<String>> {
            let queues = queues(targets, letters).into_iter();
            queues.map(|queue| queue.into_iter().map(TargetName::to_string).collect()).collect()
        };
        assert_eq!(named(&targets[..3]), [["1a"], ["2b"], ["3c"]]);
        assert_eq!(named(&targets), [vec!["1a", "2b", "4ab"], vec!["3c"], vec!["5d"], vec!["6"]]);
    }
}
