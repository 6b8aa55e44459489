//! How a namespace is used: every limit by its name.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::time::Duration;

use sealblock_protocols_nvme::nqn::Nqn;
use sealblock_runtime_reactor::net::Reconnect;

/// Who makes the tags of a namespace with protection information. On one without, it means nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum PiSource {
    /// As [`PiSource::Host`].
    #[default]
    Auto,
    /// PRACT = 0: tags travel with the data, from the writer to the medium and back, and are checked at both ends.
    Host,
    /// PRACT = 1: the target makes the tags and checks them; the device shows no protection information, and between the
    /// target and here only the data digest looks after the data.
    Target,
}

/// How a namespace is used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Options {
    /// HOSTNQN: the name of this host, by which targets allow it in.
    pub host_nqn: Nqn,
    /// HOSTID: the identifier of this host, the same for all its connections.
    pub host_id: [u8; 16],
    /// I/O queues, each a connection of its own, all on this reactor; at least 1. The target may grant fewer.
    pub queues: u16,
    /// Commands in flight on one queue; at least 1. Further ones wait in order. Cut to what CAP.MQES and MAXCMD allow.
    pub queue_depth: u16,
    /// Whether PDU headers are to carry digests; a target that does not agree is refused.
    pub header_digest: bool,
    /// Whether data is to carry digests; a target that does not agree is refused.
    pub data_digest: bool,
    /// Who makes tags.
    pub protection: PiSource,
    /// The most bytes of data in one transfer, if the target's MDTS does not say less; at least one block.
    pub transfer_bytes: u32,
    /// Time for names, connections and everything up to the first I/O, of one attempt.
    pub connect_timeout: Duration,
    /// Time for one command; then the connection is reset. Noticed up to an eighth of it late.
    pub request_timeout: Duration,
    /// KATO: the target drops this host after so long without a sign of life; one is sent twice as often. Zero for none.
    pub keep_alive: Duration,
    /// Time that [`crate::NvmeTcpDevice::close`] gives the target to shut the controller down.
    pub shutdown_timeout: Duration,
    /// Times that one request is sent again after a status that allows it, without counting lost connections.
    pub retries: u8,
    /// Connections that one request may lose before it fails, so that a request which kills its target stops doing so.
    pub max_connection_losses: u8,
    /// What happens when a connection is lost.
    pub reconnect: Reconnect,
}

impl Default for Options {
    /// One queue of 128 commands, no digests, tags made here where the namespace has any, transfers of 1 MiB, 10 s to
    /// connect, 30 s for a request, 30 s keep alive, 5 s to shut down, 3 retries, 4 losses. The host's name and identifier
    /// are made at random once for each process; a host that is to be recognised sets its own.
    fn default() -> Options {
        let host_id = random_id();
        Options {
            host_nqn: Nqn::from_uuid(host_id),
            host_id,
            queues: 1,
            queue_depth: 128,
            header_digest: false,
            data_digest: false,
            protection: PiSource::Auto,
            transfer_bytes: 1 << 20,
            connect_timeout: Duration::from_secs(10),
            request_timeout: Duration::from_secs(30),
            keep_alive: Duration::from_secs(30),
            shutdown_timeout: Duration::from_secs(5),
            retries: 3,
            max_connection_losses: 4,
            reconnect: Reconnect::default(),
        }
    }
}

/// A version 4 UUID that is the same for the whole process.
fn random_id() -> [u8; 16] {
    static ID: std::sync::OnceLock<[u8; 16]> = std::sync::OnceLock::new();
    *ID.get_or_init(|| {
        let half = || RandomState::new().hash_one(std::process::id()).to_le_bytes();
        let mut id = [0; 16];
        id[..8].copy_from_slice(&half());
        id[8..].copy_from_slice(&half());
        id[6] = id[6] & 0x0F | 0x40;
        id[8] = id[8] & 0x3F | 0x80;
        id
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_one_host_with_a_valid_name() {
        let options = Options::default();
        assert_eq!(options, Options::default());
        assert_eq!(options.host_nqn.as_str().parse::<Nqn>().unwrap(), options.host_nqn);
    }
}
