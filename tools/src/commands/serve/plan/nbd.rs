//! What is offered over NBD: pure values, like the plan they come from.
//!
//! NBD knows no names of hosts. So a namespace of a subsystem that is only for some hosts is offered over NBD only if the
//! configuration gives it a name there.

use std::collections::BTreeMap;
use std::time::Duration;

use sealblock_exports_nbd as nbd;
use sealblock_exports_nvme_tcp::{Hosts, Limits};
use sealblock_stack::{Cause, StackError};

use super::{NQN_PREFIX, NamespacePlan, SubsystemPlan};

/// Longest name of an export, in bytes ("String encoding" of the protocol).
const MAX_NAME_BYTES: usize = 4096;

/// The name under which NBD clients have a namespace, if they have it at all: what the configuration says; else that of the
/// subsystem without our prefix, with the namespace's number behind it but for the first.
pub fn export_name(subsystem: &SubsystemPlan, namespace: &NamespacePlan) -> Option<String> {
    if let Some(name) = &namespace.nbd {
        return Some(name.clone());
    }
    if subsystem.hosts != Hosts::Any {
        return None;
    }
    let nqn = subsystem.nqn.as_str();
    let name = nqn.strip_prefix(NQN_PREFIX).unwrap_or(nqn);
    let is_first = subsystem.namespaces.first().is_some_and(|first| first.nsid == namespace.nsid);
    Some(if is_first { name.to_owned() } else { format!("{name}/{}", namespace.nsid) })
}

/// Refuses names that are taken or too long, and exports that would all stay away.
pub fn check(subsystems: &[SubsystemPlan]) -> Result<(), StackError> {
    let refused = |why: String| StackError::new(Cause::Usage, "serving over NBD", why);
    let mut seen = BTreeMap::new();
    for subsystem in subsystems {
        for namespace in &subsystem.namespaces {
            let Some(name) = export_name(subsystem, namespace) else { continue };
            if name.len() > MAX_NAME_BYTES {
                let why = format!("an export's name has at most {MAX_NAME_BYTES} bytes, not {}", name.len());
                return Err(refused(why).on(&namespace.target));
            }
            if let Some(other) = seen.insert(name.clone(), &namespace.target) {
                let advice = "nbd = \"NAME\" of its own for one of the namespaces";
                return Err(refused(format!("it would be the export {name:?}, as {other}"))
                    .on(&namespace.target)
                    .advise(advice));
            }
        }
    }
    if seen.is_empty() {
        let why = "everything is only for some hosts, and NBD clients cannot say who they are".to_owned();
        return Err(refused(why).advise("nbd = \"NAME\" for what all NBD clients may have, or no --allow-host"));
    }
    Ok(())
}

/// The limits of NBD connections: those that mean the same. The rest are the protocol's own. The longest request stays what
/// clients assume that do not ask, since the protocol lets a server end the connection over a longer one.
pub fn limits(limits: &Limits) -> nbd::Limits {
    let mut own = nbd::Limits {
        connections: limits.connections,
        total_bytes_in_flight: limits.total_bytes_in_flight,
        negotiation: limits.connect.max(Duration::from_millis(1)),
        receive: limits.receive,
        drain: limits.drain,
        ..nbd::Limits::default()
    };
    own.connection.commands = limits.commands.into();
    own.connection.bytes_in_flight = limits.bytes_in_flight;
    own
}

#[cfg(test)]
mod tests {
    use super::super::super::config::parse;
    use super::*;

    const SPACE: &str = "[[subsystems.namespaces]]\ntarget = \"mem:1MiB\"\n";

    fn subsystem(head: &str, spaces: &[&str]) -> String {
        let spaces: String = spaces.iter().map(|more| format!("{SPACE}{more}\n")).collect();
        format!("[[subsystems]]\n{head}\n{spaces}")
    }

    fn names(text: &str) -> Vec<Option<String>> {
        let plan = parse(text).unwrap();
        let of = |subsystem: &SubsystemPlan| -> Vec<_> {
            subsystem.namespaces.iter().map(|namespace| export_name(subsystem, namespace)).collect()
        };
        plan.subsystems.iter().flat_map(of).collect()
    }

    fn refused(text: &str) -> String {
        check(&parse(text).unwrap().subsystems).unwrap_err().to_string()
    }

    #[test]
    fn exports_are_named_after_subsystem_and_namespace() {
        let ours = subsystem("name = \"photos\"", &["nsid = 3", "nsid = 7", "nsid = 8\nnbd = \"mine\""]);
        let foreign = subsystem("nqn = \"nqn.2026-01.org.example:scratch\"", &[""]);
        let named = names(&(ours + &foreign));
        let wanted = ["photos", "photos/7", "mine", "nqn.2026-01.org.example:scratch"];
        assert_eq!(named, wanted.map(|name| Some(name.to_owned())));
    }

    #[test]
    fn what_is_only_for_some_hosts_stays_away_unless_it_is_named() {
        let hosts = "name = \"a\"\nhosts = [\"nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6\"]";
        assert_eq!(names(&subsystem(hosts, &["", "nbd = \"b\""])), [None, Some("b".to_owned())]);
        assert!(refused(&subsystem(hosts, &[""])).contains("only for some hosts"));
        assert!(check(&parse(&subsystem(hosts, &["nbd = \"b\""])).unwrap().subsystems).is_ok());
    }

    #[test]
    fn names_are_taken_once_and_not_too_long() {
        let twice = subsystem("name = \"a\"", &[""]) + &subsystem("name = \"b\"", &["nbd = \"a\""]);
        assert!(refused(&twice).contains("the export \"a\", as mem:1MiB"), "{}", refused(&twice));
        let long = |len: usize| subsystem("name = \"a\"", &[&format!("nbd = \"{}\"", "x".repeat(len))]);
        assert!(refused(&long(4097)).contains("4096"));
        assert!(check(&parse(&long(4096)).unwrap().subsystems).is_ok());
    }

    #[test]
    fn limits_that_mean_the_same_are_the_same() {
        let ours = Limits { connections: 3, commands: 77, bytes_in_flight: 1 << 20, ..Limits::default() };
        let theirs = limits(&ours);
        assert_eq!((theirs.connections, theirs.connection.commands), (3, 77));
        assert_eq!((theirs.connection.bytes_in_flight, theirs.total_bytes_in_flight), (1 << 20, 256 << 20));
        assert_eq!((theirs.negotiation, theirs.receive, theirs.drain), (ours.connect, ours.receive, ours.drain));
        assert_eq!(theirs.connection.payload_bytes, 32 << 20, "what every client may take for granted");
    }
}
