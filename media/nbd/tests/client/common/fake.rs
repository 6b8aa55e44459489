//! A server that replies as a script specifies, on sealblock's own core: wrong replies, but well formed bytes.

use std::cell::Cell;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use sealblock_protocols_nbd::{
    Command, ErrorReply, Event, Export, IdentitySource, Request, Server, ServerConfig, StatusDescriptor,
};
use sealblock_runtime_memory::{Buffer, Slice};
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{pool, sleep, spawn};

/// The reply to a request.
pub enum Reply {
    /// This error.
    Fail(ErrorReply),
    /// Runs of status.
    Status(Vec<StatusDescriptor>),
    /// Nothing.
    Silence,
    /// The end of the connection.
    Close,
    /// These bytes, and nothing after them.
    Bytes(Vec<u8>),
    /// Nothing, and nothing more is read from this connection until this is set.
    Hold(Rc<Cell<bool>>),
}

/// What the system buffers beyond what was read: less than a large write.
const SOCKET_BYTES: usize = 64 << 10;

type Script = dyn Fn(&Command) -> Option<Reply>;

/// A running fake server, and the requests that it received.
pub struct Fake {
    pub address: SocketAddr,
    pub requests: Rc<Cell<usize>>,
    pub connections: Rc<Cell<usize>>,
    /// Connections that have ended.
    pub ended: Rc<Cell<usize>>,
}

/// 4096 blocks of 4096 bytes.
pub fn export() -> Export {
    Export {
        name: "disk".into(),
        description: String::new(),
        size_bytes: 16 << 20,
        block_bytes: 512,
        writable: true,
        trim: true,
        write_zeroes: true,
        older: 0,
        identity: IdentitySource::default(),
    }
}

/// Serves an export on which everything succeeds and reads as zeroes, except where `script` replies.
pub fn serve(export: Export, script: impl Fn(&Command) -> Option<Reply> + 'static) -> Fake {
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
    let address = listener.local_addr().unwrap();
    let fake = Fake { address, requests: Rc::default(), connections: Rc::default(), ended: Rc::default() };
    let (requests, connections) = (Rc::clone(&fake.requests), Rc::clone(&fake.connections));
    let ended = Rc::clone(&fake.ended);
    let script: Rc<Script> = Rc::new(script);
    spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            connections.set(connections.get() + 1);
            stream.set_recv_buffer_bytes(SOCKET_BYTES).expect("a small buffer");
            let core = Server::new(ServerConfig::new(pool(), [export.clone()]));
            let answers = answer_all(core, stream, Rc::clone(&script), Rc::clone(&requests));
            let ended = Rc::clone(&ended);
            spawn(async move {
                answers.await;
                ended.set(ended.get() + 1);
            });
        }
    });
    fake
}

async fn answer_all(mut core: Server, stream: Stream, script: Rc<Script>, requests: Rc<Cell<usize>>) {
    let mut out = Vec::new();
    loop {
        if core.transmit(&mut out) > 0 && stream.send_all(out.drain(..)).await.is_err() {
            return;
        }
        let Some(buffer) = core.receive_buffer() else { return };
        let (Ok(len @ 1..), buffer) = stream.recv(buffer).await else { return };
        core.received(buffer, len);
        while let Some(event) = core.next_event() {
            let Event::Request(Request { ticket, command }) = event else { continue };
            requests.set(requests.get() + 1);
            match script(&command) {
                Some(Reply::Fail(failed)) => core.fail(ticket, Vec::new(), &failed),
                Some(Reply::Status(runs)) => core.status(ticket, &runs),
                Some(Reply::Silence) => drop(ticket),
                Some(Reply::Close) => return,
                Some(Reply::Hold(until)) => {
                    while !until.get() {
                        sleep(Duration::from_millis(1)).await;
                    }
                    drop(ticket);
                }
                Some(Reply::Bytes(bytes)) => {
                    let _ = stream.send_all([Slice::copy_from(&bytes)]).await;
                    return;
                }
                None => match command {
                    Command::Read { length, .. } => {
                        core.data(ticket, vec![Buffer::zeroed(length as usize).freeze()]);
                    }
                    Command::BlockStatus { length, .. } => {
                        core.status(ticket, &[StatusDescriptor { length, status: 0 }])
                    }
                    _ => core.done(ticket),
                },
            }
        }
    }
}
