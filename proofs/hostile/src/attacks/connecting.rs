//! Connect and properties: what an unknown host may send.

use anyhow::{Result, ensure};
use sealblock_protocols_nvme::fabrics::{CNTLID_DYNAMIC, FabricsCommand, PropertySet};
use sealblock_protocols_nvme::{AdminOpcode, Command, FABRICS_OPCODE};

use super::context::{TestContext, queues};
use crate::process::limits;
use crate::wire::{Answer, Data, Peer, SUBNQN, connect as connect_command};

const INVALID_OPCODE: u16 = 0x001;
const INVALID_FIELD: u16 = 0x002;
const SEQUENCE_ERROR: u16 = 0x00C;
const SGL_LENGTH: u16 = 0x00F;
const INVALID_FORMAT: u16 = 0x180;
const INVALID_PARAMETERS: u16 = 0x182;

fn want(what: &str, answer: &Answer, allowed: &[u16]) -> Result<()> {
    ensure!(allowed.contains(&answer.status), "{what}: status {:#x}, not one of {allowed:x?}", answer.status);
    Ok(())
}

/// Dword 0 of a completion that names a parameter: whether it is in the data, and its offset.
fn named(answer: &Answer) -> (bool, u16) {
    (answer.result & 1 << 16 != 0, answer.result as u16)
}

pub(super) fn connect(context: &TestContext) -> Result<()> {
    let ready = || Peer::ready(context.address, 0);
    let (good, data) = connect_command(SUBNQN, 0, 32, CNTLID_DYNAMIC, 0);
    corrupted_data(context, good, &data)?;
    let mut peer = ready()?;
    for (what, queue, entries) in [("SQSIZE 65535", 0, 1 << 16), ("more entries than MQES", 0, 129)] {
        ensure!(entries > u32::from(limits().commands), "the limit is below");
        let (command, data) = connect_command(SUBNQN, queue, entries, CNTLID_DYNAMIC, 0);
        let answer = peer.call(command, Data::Write(&data))?;
        want(what, &answer, &[INVALID_PARAMETERS])?;
        ensure!(named(&answer) == (false, 44), "{what} names {:?}", named(&answer));
    }
    let mut zero = good;
    zero.cdw11 = 0.into();
    want("SQSIZE 0", &peer.call(zero, Data::Write(&data))?, &[INVALID_PARAMETERS])?;
    let mut format = good;
    format.cdw10 = 1.into();
    want("RECFMT 1", &peer.call(format, Data::Write(&data))?, &[INVALID_FORMAT])?;
    want("no data", &peer.call(good, Data::None)?, &[SGL_LENGTH, INVALID_FIELD])?;
    want("half of the data", &peer.call(good, Data::Write(&data[..512]))?, &[SGL_LENGTH])?;
    want("too much data", &peer.call(good, Data::Write(&vec![0; 64 << 10]))?, &[SGL_LENGTH])?;
    for (command, what) in [
        (Command::new(AdminOpcode::Identify.code(), 0), "Identify"),
        (Command::new(0, 1), "Flush"),
        (Command::new(AdminOpcode::KeepAlive.code(), 0), "Keep Alive"),
    ] {
        want(what, &peer.call(command, Data::None)?, &[SEQUENCE_ERROR])?;
    }
    want("a property", &peer.property_get(0x08, 4)?, &[SEQUENCE_ERROR])?;
    // After all of that, a valid Connect still succeeds.
    want("Connect", &peer.call(good, Data::Write(&data))?, &[0])?;
    want("Connect twice", &peer.call(good, Data::Write(&data))?, &[SEQUENCE_ERROR])?;
    io_queues(context)
}

/// Unterminated and invalid names, names of other subsystems or hosts, and a controller that does not exist.
fn corrupted_data(context: &TestContext, good: Command, data: &[u8]) -> Result<()> {
    let mut peer = Peer::ready(context.address, 0)?;
    for (what, at, bytes) in [
        ("a subsystem that is not there", 260, b"X".as_slice()),
        ("a subsystem's name that does not end", 256, &[b'n'; 256]),
        ("no name of a subsystem", 256, &[0; 256]),
        ("a name that is no UTF-8", 256, &[0xFF; 100]),
        ("a host's name that does not end", 512, &[b'n'; 256]),
        ("a host's name with a control character", 520, &[7]),
        ("a controller that is not there", 16, &[0x34, 0x12]),
    ] {
        let mut data = data.to_vec();
        data[at..at + bytes.len()].copy_from_slice(bytes);
        let answer = peer.call(good, Data::Write(&data))?;
        want(what, &answer, &[INVALID_PARAMETERS])?;
        let field = if at >= 512 {
            512
        } else if at >= 256 {
            256
        } else {
            16
        };
        ensure!(named(&answer) == (true, field), "{what} names {:?}", named(&answer));
    }
    Ok(())
}

fn io_queues(context: &TestContext) -> Result<()> {
    let (mut admin, cntlid) = Peer::admin(context.address, SUBNQN, 0)?;
    let mut peer = Peer::ready(context.address, 0)?;
    for queue in [2, 5, 65535] {
        let (command, data) = connect_command(SUBNQN, queue, 32, cntlid, 0);
        let answer = peer.call(command, Data::Write(&data))?;
        want("a queue that was not granted", &answer, &[INVALID_PARAMETERS])?;
        ensure!(named(&answer) == (false, 42), "queue {queue} names {:?}", named(&answer));
    }
    let (command, data) = connect_command(SUBNQN, 1, 32, cntlid, 0);
    let mut other = data.clone();
    other[0] ^= 1;
    want("another host's controller", &peer.call(command, Data::Write(&other))?, &[INVALID_PARAMETERS])?;
    want("an I/O queue", &peer.call(command, Data::Write(&data))?, &[0])?;
    let mut second = Peer::ready(context.address, 0)?;
    want("the same queue twice", &second.call(command, Data::Write(&data))?, &[SEQUENCE_ERROR])?;
    for opcode in [AdminOpcode::Identify, AdminOpcode::SetFeatures, AdminOpcode::KeepAlive] {
        let answer = peer.call(Command::new(opcode.code(), 0), Data::None)?;
        ensure!(answer.status != 0, "{opcode:?} on an I/O queue succeeds");
    }
    let answer = peer.property_get(0x08, 4)?;
    ensure!(answer.status != 0, "a property on an I/O queue");
    // When the admin queue ends, the I/O queue ends too.
    want("Keep Alive", &admin.call(Command::new(AdminOpcode::KeepAlive.code(), 0), Data::None)?, &[0])?;
    drop(admin);
    peer.read_to_end()?;
    Ok(())
}

pub(super) fn properties(context: &TestContext) -> Result<()> {
    let (mut admin, _) = queues(context)?;
    for offset in (0..0x100).chain([0xFFF, 0x1000, 0x7FFF_FFFF, u32::MAX - 3, u32::MAX]) {
        for bytes in [4, 8] {
            let answer = admin.property_get(offset, bytes)?;
            want("Property Get", &answer, &[0, INVALID_FIELD])?;
            if offset == 0x14 {
                continue;
            }
            let set = FabricsCommand::PropertySet(PropertySet { offset, bytes, value: u64::MAX });
            want("Property Set", &admin.call(set.encode(), Data::None)?, &[0, INVALID_FIELD])?;
        }
    }
    for bit in 0..32 {
        for value in [1_u64 << bit, 0x0046_0001 | 1 << bit] {
            let set = FabricsCommand::PropertySet(PropertySet { offset: 0x14, bytes: 4, value });
            want("CC", &admin.call(set.encode(), Data::None)?, &[0, INVALID_FIELD])?;
        }
    }
    for kind in 0..=255 {
        let mut command = Command::new(FABRICS_OPCODE, kind);
        command.cdw10 = u32::MAX.into();
        command.cdw11 = u32::MAX.into();
        let answer = admin.call(command, Data::None)?;
        want("a Fabrics command", &answer, &[0, INVALID_OPCODE, INVALID_FIELD, SEQUENCE_ERROR])?;
    }
    Ok(())
}
