//! A host that sends commands before it has received anything.

use sealblock_protocols_nvme_tcp::target::Target;
use sealblock_protocols_nvme_tcp::{Host, HostConfig, TargetConfig, TransmitLimit};

use super::*;

/// The bytes of ICReq, and of ICResp.
pub const SETUP_BYTES: usize = 128;

/// What a host sends, made in advance: it was set up with another target, which negotiates the same.
pub struct Early {
    host: Host,
    /// ICReq, and the commands.
    pub bytes: Vec<u8>,
    setup_reply: Vec<u8>,
    pub cids: Vec<u16>,
}

/// All output of a host or target.
macro_rules! output {
    ($core:expr) => {{
        let (mut out, mut bytes) = (Vec::new(), Vec::new());
        while $core.transmit(&mut out, TransmitLimit::default()) > 0 {
            bytes.extend(out.drain(..).flat_map(|slice: Slice| slice.to_vec()));
        }
        bytes
    }};
}

/// Lets a host or target receive bytes.
macro_rules! receive {
    ($core:expr, $bytes:expr) => {{
        let mut buffer = $core.receive_buffer().expect("it is open");
        buffer[..$bytes.len()].copy_from_slice(&$bytes);
        $core.received(buffer, $bytes.len());
        while $core.next_event().is_some() {}
    }};
}

impl Early {
    pub fn new(digests: bool) -> Early {
        let mut config = HostConfig::new(pool());
        (config.header_digest, config.data_digest) = (digests, digests);
        let (mut host, mut target) = (Host::new(config), Target::new(TargetConfig::new(pool())));
        let bytes = output!(host);
        receive!(target, bytes);
        let setup_reply = output!(target);
        receive!(host, setup_reply);
        assert_eq!((bytes.len(), setup_reply.len()), (SETUP_BYTES, SETUP_BYTES));
        Early { host, bytes, setup_reply, cids: Vec::new() }
    }

    /// The same with a Connect of an I/O queue.
    pub fn connect(self, subnqn: &str, queue: u16, cntlid: u16) -> Early {
        let (command, data) = connect_command(subnqn, queue, cntlid, 0, HOSTNQN);
        self.submit(command, Data::Write(data))
    }

    /// The same with this command.
    pub fn submit(mut self, command: Command, data: Data) -> Early {
        self.cids.push(self.host.submit(command, host_data(data)).unwrap().0);
        self.bytes.extend(output!(self.host));
        self
    }

    /// Sends everything, in pieces that end at these places.
    pub async fn send(self, address: SocketAddr, cuts: &[usize]) -> Queue {
        let mut stream = self.send_part(address, cuts, self.bytes.len()).await;
        let reply = recv_exactly(&mut stream, SETUP_BYTES).await;
        assert_eq!(reply, self.setup_reply, "one answer to ICReq");
        Queue { host: self.host, stream, done: HashMap::new(), cntlid: 0, hostnqn: HOSTNQN }
    }

    /// Sends the first bytes.
    pub async fn send_part(&self, address: SocketAddr, cuts: &[usize], len: usize) -> Stream {
        let stream = Stream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let mut from = 0;
        for cut in cuts.iter().copied().filter(|cut| *cut < len).chain([len]) {
            stream.send_all([Slice::copy_from(&self.bytes[from..cut])]).await.unwrap();
            from = cut;
            sleep(Duration::from_millis(1)).await;
        }
        stream
    }
}

async fn recv_exactly(stream: &mut Stream, len: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < len {
        let (result, buffer) = stream.recv(Buffer::zeroed(len - all.len())).await;
        let received = result.unwrap();
        assert!(received > 0, "the connection ended");
        all.extend(&buffer[..received]);
    }
    all
}
