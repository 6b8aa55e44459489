//! A host over NVMe/TCP that asks what the commands do not: an admin queue, and Get LBA Status.

use std::net::SocketAddr;
use std::time::Duration;

use sealblock_protocols_nvme::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectAttributes, ConnectData, FabricsCommand, PropertyGet, PropertySet,
};
use sealblock_protocols_nvme::nvm::{GetLbaStatus, LbaStatusAction, LbaStatusList};
use sealblock_protocols_nvme::{Command, Completion};
use sealblock_protocols_nvme_tcp::host::{Event, HostData};
use sealblock_protocols_nvme_tcp::{Host, HostConfig, TransmitLimit};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::Stream;
use sealblock_runtime_reactor::{Config, Reactor, pool, sleep};
use sealblock_units::Lba;

/// The runs of blocks (first and number) that namespace 1 of a subsystem says are bad, without looking at any.
#[track_caller]
pub fn known_bad(address: &str, subsystem: &str) -> Vec<(u64, u64)> {
    const MOST_BYTES: u64 = 4096;
    let address: SocketAddr = address.parse().unwrap();
    let reactor = Reactor::new(Config { pool_arena_bytes: 0, ..Config::default() }).unwrap();
    reactor.block_on(async {
        let mut admin = Queue::admin(address, subsystem).await;
        let action = LbaStatusAction::Tracked;
        let ask = GetLbaStatus { start: Lba::ZERO, max_bytes: MOST_BYTES, action, range_blocks: 0 };
        let buffer = Buffer::zeroed(MOST_BYTES as usize);
        let (completion, data) = admin.call(ask.encode(1), HostData::Read { buffer, layout: None }).await;
        assert!(completion.status().is_success(), "{completion:?}");
        let list = LbaStatusList::decode(&data).unwrap();
        list.descriptors.iter().map(|run| (run.extent.start().get(), run.extent.len())).collect()
    })
}

/// An admin queue.
struct Queue {
    host: Host,
    stream: Stream,
}

impl Queue {
    async fn admin(address: SocketAddr, subsystem: &str) -> Queue {
        let stream = Stream::connect(address).await.unwrap();
        let mut queue = Queue { host: Host::new(HostConfig::new(pool())), stream };
        queue.send().await;
        while queue.host.negotiated().is_none() {
            assert!(queue.receive().await.is_none());
        }
        let connect = Connect { queue: 0, entries: 32, attributes: ConnectAttributes::NONE, keep_alive_ms: 0 };
        let hostnqn = "nqn.2026-11.org.example:host".parse().ok();
        let subnqn = format!("nqn.2026-11.io.sealblock:{subsystem}").parse().unwrap();
        let data = ConnectData { hostid: [9; 16], cntlid: CNTLID_DYNAMIC, subnqn, hostnqn };
        queue.done(connect.encode(), HostData::Write(Slice::copy_from(&data.encode()).into())).await;
        let enable = FabricsCommand::PropertySet(PropertySet { offset: 0x14, bytes: 4, value: 0x0046_0001 });
        queue.done(enable.encode(), HostData::None).await;
        let status = FabricsCommand::PropertyGet(PropertyGet { offset: 0x1C, bytes: 4 });
        while queue.done(status.encode(), HostData::None).await.result.get() != 1 {
            sleep(Duration::from_millis(1)).await;
        }
        queue
    }

    async fn done(&mut self, command: Command, data: HostData) -> Completion {
        let (completion, _) = self.call(command, data).await;
        assert!(completion.status().is_success(), "{completion:?}");
        completion
    }

    /// One command, alone.
    async fn call(&mut self, command: Command, data: HostData) -> (Completion, Vec<u8>) {
        self.host.submit(command, data).unwrap();
        self.send().await;
        loop {
            if let Some(answer) = self.receive().await {
                return answer;
            }
        }
    }

    async fn send(&mut self) {
        let mut out = Vec::new();
        while self.host.transmit(&mut out, TransmitLimit::default()) > 0 {
            self.stream.send_all(out.drain(..)).await.unwrap();
        }
    }

    async fn receive(&mut self) -> Option<(Completion, Vec<u8>)> {
        let (result, buffer) = self.stream.recv(self.host.receive_buffer().unwrap()).await;
        let count = result.unwrap();
        assert!(count > 0, "the target goes on");
        self.host.received(buffer, count);
        let mut answer = None;
        while let Some(event) = self.host.next_event() {
            if let Event::Completed { completion, data, .. } = event {
                answer = Some((completion, data.map(|data| data.buffer.to_vec()).unwrap_or_default()));
            }
        }
        self.send().await;
        answer
    }
}
