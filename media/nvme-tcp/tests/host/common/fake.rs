//! A target that replies as a script specifies, on sealblock's own core: wrong completions, but well formed PDUs.

use std::cell::{Cell, RefCell};
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;

use sealblock_protocols_nvme::admin::{AdminCommand, Cns};
use sealblock_protocols_nvme::identify::{
    Controller, ControllerType, Namespace, NamespaceFormat, NamespaceId, NvmNamespace, Oncs, Vwc, namespace_list,
};
use sealblock_protocols_nvme::nvm::IoCommand;
use sealblock_protocols_nvme::registers::Capabilities;
use sealblock_protocols_nvme::{Command, Completion, Count8, FABRICS_OPCODE, Status, StatusCode};
use sealblock_protocols_nvme_tcp::target::{CommandData, Event, Token};
use sealblock_protocols_nvme_tcp::{Target, TargetConfig, TransmitLimit};
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::net::{Listener, Stream};
use sealblock_runtime_reactor::{pool, spawn};
use sealblock_units::BlockSize;

/// The reply to a command.
#[derive(Clone, Debug)]
pub enum Reply {
    /// Success and this result.
    Done(u64),
    /// This status.
    Status(Status),
    /// Success and these bytes, as many as the host requests.
    Data(Vec<u8>),
    /// Nothing.
    Silence,
    /// The end of the connection.
    Close,
}

/// A command as scripts see it.
pub enum Asked {
    Fabrics(Command),
    Admin(AdminCommand),
    Io(IoCommand),
    Other,
}

type Script = dyn Fn(&Asked) -> Option<Reply>;

/// The pages of a good controller with one plain namespace of 4096 blocks of 4 KiB.
#[derive(Clone)]
pub struct Pages {
    pub controller: Controller,
    pub namespace: Namespace,
    pub nvm_namespace: NvmNamespace,
}

pub fn good() -> Pages {
    let (mut namespace, mut nvm_namespace) =
        (Namespace { nsze: 4096, ncap: 4096, ..Namespace::default() }, NvmNamespace::default());
    let format = NamespaceFormat {
        block_size: BlockSize::B4096,
        metadata_bytes: 0,
        extended: false,
        protection: None,
        storage_tag_mask: 0,
    };
    format.describe(&mut namespace, &mut nvm_namespace);
    let controller = Controller {
        cntrltype: ControllerType::Io.code(),
        mdts: 8,
        sqes: 0x66,
        cqes: 0x44,
        nn: 1,
        ioccsz: (64 + 8192) / 16,
        elpe: Count8::saturating(64),
        oncs: Oncs::VERIFY | Oncs::COMPARE | Oncs::WRITE_ZEROES | Oncs::DATASET_MANAGEMENT,
        vwc: Vwc::PRESENT,
        ..Controller::default()
    };
    Pages { controller, namespace, nvm_namespace }
}

/// A running fake target, and the commands that it received.
pub struct Fake {
    pub address: SocketAddr,
    pub commands: Rc<Cell<usize>>,
    pub last_io: Rc<RefCell<Option<(u16, u16)>>>,
}

/// Serves `pages`, and the replies of `script` where it has any.
pub fn serve(pages: Pages, script: impl Fn(&Asked) -> Option<Reply> + 'static) -> Fake {
    let listener = Listener::bind((Ipv4Addr::LOCALHOST, 0).into(), 16).unwrap();
    let address = listener.local_addr().unwrap();
    let (commands, script): (_, Rc<Script>) = (Rc::new(Cell::new(0)), Rc::new(script));
    let last_io = Rc::new(RefCell::new(None));
    let counted = Rc::clone(&commands);
    let last = Rc::clone(&last_io);
    spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let one = Connection {
                core: Target::new(TargetConfig::new(pool())),
                pages: pages.clone(),
                script: Rc::clone(&script),
                configuration: 0,
                queue: 0,
                commands: Rc::clone(&counted),
                last_io: Rc::clone(&last),
            };
            spawn(one.run(stream));
        }
    });
    Fake { address, commands, last_io }
}

struct Connection {
    core: Target,
    pages: Pages,
    script: Rc<Script>,
    configuration: u64,
    queue: u16,
    commands: Rc<Cell<usize>>,
    last_io: Rc<RefCell<Option<(u16, u16)>>>,
}

impl Connection {
    async fn run(mut self, stream: Stream) {
        let mut out = Vec::new();
        loop {
            while self.core.transmit(&mut out, TransmitLimit::default()) > 0 {
                if stream.send_all(out.drain(..)).await.is_err() {
                    return;
                }
            }
            let Some(buffer) = self.core.receive_buffer() else { return };
            let (Ok(len @ 1..), buffer) = stream.recv(buffer).await else { return };
            self.core.received(buffer, len);
            while let Some(event) = self.core.next_event() {
                if let Event::Command { token, command, data } = event
                    && !self.answer(token, command, &data)
                {
                    return;
                }
            }
        }
    }

    /// True if the connection continues.
    fn answer(&mut self, token: Token, command: Command, data: &CommandData) -> bool {
        self.commands.set(self.commands.get() + 1);
        let asked = match self.queue {
            _ if command.opcode == FABRICS_OPCODE => Asked::Fabrics(command),
            0 => AdminCommand::decode(&command).map_or(Asked::Other, Asked::Admin),
            _ => {
                *self.last_io.borrow_mut() = Some((self.queue, command.cid.get()));
                IoCommand::decode(&command).map_or(Asked::Other, Asked::Io)
            }
        };
        let room = if let CommandData::Transport { len_bytes } = data { *len_bytes as usize } else { 0 };
        let reply = (self.script)(&asked).unwrap_or_else(|| self.honest(&asked, room));
        let done = |status, result| Completion::new(0, status, result);
        match reply {
            Reply::Done(result) => self.core.respond(token, done(Status::SUCCESS, result)).unwrap(),
            Reply::Status(status) => self.core.respond(token, done(status, 0)).unwrap(),
            Reply::Data(mut bytes) => {
                bytes.truncate(room);
                self.core.send_data(token, Slice::copy_from(&bytes), Some(done(Status::SUCCESS, 0))).unwrap();
            }
            Reply::Silence => {}
            Reply::Close => return false,
        }
        true
    }

    fn honest(&mut self, asked: &Asked, room: usize) -> Reply {
        let page = |page: [u8; 4096]| Reply::Data(page.to_vec());
        let unknown = || Reply::Status(StatusCode::INVALID_FIELD.status());
        match asked {
            Asked::Fabrics(command) => self.fabrics(command),
            Asked::Admin(AdminCommand::Identify(ask)) => match ask.cns {
                Cns::Controller => page(self.pages.controller.encode()),
                Cns::Namespace => page(self.pages.namespace.encode()),
                Cns::CommandSetNamespace => page(self.pages.nvm_namespace.encode()),
                Cns::ActiveNamespaces => page(namespace_list([1], ask.nsid).unwrap()),
                Cns::NamespaceDescriptors => page(NamespaceId::list(&[NamespaceId::Uuid([7; 16])])),
                _ => unknown(),
            },
            Asked::Admin(AdminCommand::SetFeatures(_)) => Reply::Done(0),
            Asked::Admin(AdminCommand::AsynchronousEventRequest) => Reply::Silence,
            Asked::Admin(AdminCommand::KeepAlive) => Reply::Done(0),
            Asked::Admin(_) | Asked::Io(IoCommand::Read(_)) if room > 0 => Reply::Data(vec![0; room]),
            Asked::Io(_) => Reply::Done(0),
            Asked::Admin(_) | Asked::Other => unknown(),
        }
    }

    fn fabrics(&mut self, command: &Command) -> Reply {
        const CAPABILITIES: Capabilities = Capabilities {
            max_queue_entries: 128,
            contiguous_queues: true,
            timeout_500ms: 10,
            subsystem_reset: false,
            command_sets: Capabilities::NVM_COMMAND_SET,
            mpsmin: 0,
            mpsmax: 0,
            ready_modes: 0,
        };
        match (command.nsid.get() as u8, command.cdw11.get()) {
            (1, _) => {
                self.queue = (command.cdw10.get() >> 16) as u16;
                Reply::Done(1)
            }
            (0, 0x14) => {
                self.configuration = u64::from(command.cdw12.get());
                Reply::Done(0)
            }
            (4, 0x00) => Reply::Done(CAPABILITIES.bits()),
            (4, 0x08) => Reply::Done(0x0002_0100),
            (4, 0x14) => Reply::Done(self.configuration),
            (4, 0x1C) => Reply::Done(self.configuration & 1 | if self.configuration & 0xC000 != 0 { 8 } else { 0 }),
            _ => Reply::Status(StatusCode::INVALID_FIELD.status()),
        }
    }
}
