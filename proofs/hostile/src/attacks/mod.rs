//! The attacks. Each is a function that fails when the target deviates from the specification.

mod commands;
mod connecting;
mod context;
mod crowds;
pub mod cut;
mod noise;
mod silence;
mod tags;
mod violations;

use anyhow::Result;

pub use context::TestContext;

/// An attack.
pub struct Attack {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it does.
    pub what: &'static str,
    /// The maximum number of its concurrent connections, from which the memory limit follows.
    pub connections: usize,
    /// Runs it.
    pub run: fn(&TestContext) -> Result<()>,
}

const fn attack(
    name: &'static str,
    what: &'static str,
    connections: usize,
    run: fn(&TestContext) -> Result<()>,
) -> Attack {
    Attack { name, what, connections, run }
}

/// All attacks, in the order in which they run.
pub const ATTACKS: &[Attack] = &[
    attack("icreq", "ICReq with each field wrong, late, twice, and with each digest", 1, violations::icreq),
    attack("headers", "common headers with wrong type, HLEN, PDO, PLEN and flags", 2, violations::headers),
    attack(
        "capsules",
        "capsules with too much data, unexpected data, CIDs in use, more than the queue holds",
        2,
        violations::capsules,
    ),
    attack(
        "h2cdata",
        "H2CData with wrong TTAG, CCCID, offset, length, LAST_PDU; after the last; without an R2T",
        2,
        violations::h2c_data,
    ),
    attack("digests", "wrong header digests and wrong data digests", 2, violations::digests),
    attack("reordered", "the PDUs of a good session in other orders", 2, violations::reordered),
    attack("truncated", "a good session cut off at each byte, by FIN or by RST", 2, noise::truncated),
    attack("cut", "writes of several blocks cut off at every place, by FIN or by RST", 5, cut::cut),
    attack("tags", "tags of the host's making with each field wrong, in every format", 2, tags::wrong_tags),
    attack("connect", "Connect with garbage in each field, before and after its time", 3, connecting::connect),
    attack(
        "properties",
        "Property Get and Set of every offset and size, and CC with every bit",
        1,
        connecting::properties,
    ),
    attack(
        "sgl",
        "data pointers of every type, and lengths that disagree with the command",
        2,
        commands::data_pointers,
    ),
    attack("opcodes", "every opcode on either queue, with no data and with data either way", 2, commands::opcodes),
    attack("blocks", "ranges past the end, too long, and of namespaces that are not there", 2, commands::ranges),
    attack("events", "more event requests than the controller keeps", 1, commands::event_requests),
    attack("resets", "controllers enabled, shut down and reset without waiting", 2, commands::resets),
    attack("random", "random bytes, before and after the connection is set up", 1, noise::random),
    attack("mutated", "a good session with bytes changed", 2, noise::mutated),
    attack("unread", "reads whose data the host never receives, until the target takes no more", 2, silence::unread),
    attack("hoard", "log pages of the largest size that the host never receives", 1, silence::hoard),
    attack("unanswered", "R2Ts that are never answered", 2, silence::unanswered),
    attack(
        "half-closed",
        "connections whose sending half is closed at once, and in the middle",
        2,
        silence::half_closed,
    ),
    attack("drips", "connections that send nothing, or a byte at a time", 16, silence::drips),
    attack("keep-alive", "a host that falls silent with a keep alive timeout", 2, silence::keep_alive),
    attack("crowd", "all connections that the limit allows, and more", usize::MAX, crowds::crowd),
    attack("flood", "connections made and dropped as fast as they go", usize::MAX, crowds::flood),
    attack("controllers", "controllers made and left as fast as they go", 4, crowds::controllers),
];
