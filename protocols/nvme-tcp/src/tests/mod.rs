//! Both sides against each other, against hand-made PDUs, and against noise.

mod calls;
mod digests;
mod noise;
mod pair;
mod traffic;
mod violations_of_hosts;
mod violations_of_targets;

use sealblock_protocols_nvme::{Command, DataPointer};
use sealblock_runtime_memory::{Buffer, Pool, Slice};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::host::{Host, HostData};
use crate::pdu::{CapsuleCmd, Direction, IcReq, IcResp, PduRules, TermReq};
use crate::target::{self, Target};
use crate::{HostConfig, Payload, TargetConfig, TransmitLimit};

const TO_CONTROLLER: PduRules = PduRules::initial(Direction::ToController);
const TO_HOST: PduRules = PduRules::initial(Direction::ToHost);

fn pool() -> Pool {
    Pool::new(0, usize::MAX)
}

/// Bytes of a header, padding and data, without digests.
fn pdu(header: &(impl IntoBytes + Immutable), data: &[u8]) -> Vec<u8> {
    [header.as_bytes(), data].concat()
}

/// FES, FEI, and the data of the termination request.
type Term = (u16, u32, Vec<u8>);

fn term(sent: &[Slice]) -> Option<Term> {
    let bytes: Vec<u8> = sent.iter().flat_map(|slice| slice.to_vec()).collect();
    let (request, data) = TermReq::read_from_prefix(&bytes).ok()?;
    assert_eq!(request.common.plen.get() as usize, bytes.len(), "the termination request is all there is");
    Some((request.fes.get(), request.fei.get(), data.to_vec()))
}

/// A target in the hands of a hostile host.
struct Victim(Target);

impl Victim {
    fn new(config: TargetConfig) -> Victim {
        Victim(Target::new(config))
    }

    /// With the connection set up; `digests` as in DGST.
    fn connected(config: TargetConfig, digests: u8) -> Victim {
        let mut victim = Victim::new(config);
        victim.feed(IcReq::new(0, digests, 3).as_bytes());
        victim.drain();
        assert!(victim.0.negotiated().is_some());
        victim
    }

    fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some(mut buffer) = self.0.receive_buffer() else { return };
            let len = buffer.len().min(bytes.len());
            buffer[..len].copy_from_slice(&bytes[..len]);
            self.0.received(buffer, len);
            bytes = &bytes[len..];
        }
    }

    fn drain(&mut self) -> Vec<Slice> {
        let mut out = Vec::new();
        while self.0.transmit(&mut out, TransmitLimit::default()) > 0 {}
        out
    }

    /// The termination request, if the target has closed the connection over `bytes`.
    fn reaction(&mut self, bytes: &[u8]) -> Option<Term> {
        self.drain();
        self.feed(bytes);
        self.0.closed()?;
        let sent = self.drain();
        assert!(self.0.receive_buffer().is_none() && !self.0.has_output());
        assert_eq!((self.0.commands_in_flight(), self.0.bytes_in_flight()), (0, 0));
        term(&sent)
    }

    /// Starts a write of `len` bytes up to its R2T; returns its CID, which is `cid`, and its TTAG.
    fn write(&mut self, cid: u16, len: u32) -> u16 {
        self.feed(
            CapsuleCmd::new(&TO_CONTROLLER, command(1, cid, DataPointer::Transport { length_bytes: len }), 0)
                .as_bytes(),
        );
        while let Some(event) = self.0.next_event() {
            if let target::Event::Command { token, .. } = event {
                self.0.fetch_data(token, Buffer::zeroed(len as usize), None).unwrap();
            }
        }
        let sent = self.drain();
        u16::from_le_bytes([sent[0][10], sent[0][11]])
    }
}

fn command(opcode: u8, cid: u16, data: DataPointer) -> Command {
    Command::new(opcode, 1).with_cid(cid).with_data(data)
}

/// A host in the hands of a hostile target.
struct Prey(Host);

impl Prey {
    fn new(config: HostConfig) -> Prey {
        let mut prey = Prey(Host::new(config));
        prey.drain();
        prey
    }

    /// With the connection set up; `digests` as in DGST.
    fn connected(config: HostConfig, digests: u8) -> Prey {
        let mut prey = Prey::new(config);
        prey.feed(IcResp::new(0, digests, 4096).as_bytes());
        assert!(prey.0.negotiated().is_some());
        prey
    }

    fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some(mut buffer) = self.0.receive_buffer() else { return };
            let len = buffer.len().min(bytes.len());
            buffer[..len].copy_from_slice(&bytes[..len]);
            self.0.received(buffer, len);
            bytes = &bytes[len..];
        }
    }

    fn drain(&mut self) -> Vec<Slice> {
        let mut out = Vec::new();
        while self.0.transmit(&mut out, TransmitLimit::default()) > 0 {}
        out
    }

    /// The termination request, if the host has closed the connection over `bytes`.
    fn reaction(&mut self, bytes: &[u8]) -> Option<Term> {
        self.feed(bytes);
        self.0.closed()?;
        let sent = self.drain();
        assert!(self.0.receive_buffer().is_none() && !self.0.has_output() && self.0.commands_in_flight() == 0);
        term(&sent)
    }

    fn read(&mut self, len: usize) -> u16 {
        let data = HostData::Read { buffer: Buffer::zeroed(len), layout: None };
        let cid = self.0.submit(Command::new(2, 1), data).unwrap();
        self.drain();
        cid.0
    }

    /// A write that does not fit a capsule.
    fn write(&mut self, len: usize) -> u16 {
        self.0.set_max_in_capsule_bytes(0);
        let data = HostData::Write(Payload::from(Slice::copy_from(&vec![5; len])));
        let cid = self.0.submit(Command::new(1, 1), data).unwrap();
        self.drain();
        cid.0
    }
}
