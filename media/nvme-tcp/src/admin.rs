//! Admin commands and their answers, with errors that say which command it was.

use std::rc::Rc;

use sealblock_protocols_nvme::Command;
use sealblock_protocols_nvme::StatusCode;
use sealblock_protocols_nvme::admin::{Cns, GetLogPage, Identify};
use sealblock_protocols_nvme_tcp::host::HostData;
use sealblock_runtime_memory::Buffer;

use crate::queue::{CommandResult, Queue};
use crate::{ConnectError, HostPort};

/// A queue that is asked one thing after the other.
pub(crate) struct Admin {
    queue: Rc<Queue>,
    address: HostPort,
}

impl Admin {
    pub(crate) fn new(queue: Rc<Queue>, address: HostPort) -> Admin {
        Admin { queue, address }
    }

    /// The connection.
    pub(crate) fn queue(&self) -> &Rc<Queue> {
        &self.queue
    }

    /// Carries a command out, whatever its status.
    pub(crate) async fn try_execute(&self, command: Command, data: HostData) -> Result<CommandResult, ConnectError> {
        let lost = |lost: crate::error::ConnectionLost| ConnectError::Lost {
            address: self.address.clone(),
            reason: lost.to_string(),
        };
        self.queue.execute(command, data).await.map_err(lost)
    }

    /// Carries a command out that has to succeed.
    pub(crate) async fn execute(
        &self,
        what: &'static str,
        command: Command,
        data: HostData,
    ) -> Result<CommandResult, ConnectError> {
        let finished = self.try_execute(command, data).await?;
        match finished.completion.status() {
            status if status.is_success() => Ok(finished),
            status => Err(ConnectError::Refused { what, status, detail: String::new() }),
        }
    }

    /// Carries a command out that has to bring this many bytes.
    async fn read(&self, what: &'static str, command: Command, len_bytes: usize) -> Result<Buffer, ConnectError> {
        let data = HostData::Read { buffer: Buffer::zeroed(len_bytes), layout: None };
        let finished = self.execute(what, command, data).await?;
        match finished.data {
            Some(data) if data.buffer.len() == len_bytes => Ok(data.buffer),
            data => {
                let got = data.map_or(0, |data| data.buffer.len());
                Err(ConnectError::Unexpected { what, why: format!("{got} of {len_bytes} bytes") })
            }
        }
    }

    /// A page of Identify, whole.
    pub(crate) async fn identify(&self, cns: Cns, nsid: u32) -> Result<Buffer, ConnectError> {
        let what = match cns {
            Cns::Controller => "Identify Controller",
            Cns::Namespace => "Identify Namespace",
            Cns::ActiveNamespaces => "Identify, active namespaces",
            Cns::NamespaceDescriptors => "Identify, namespace identification descriptors",
            Cns::CommandSetNamespace => "Identify CNS 05h",
            Cns::CommandSetController => "Identify CNS 06h",
            Cns::IndependentNamespace => "Identify CNS 08h",
            _ => "Identify",
        };
        let ask = Identify { cns, nsid, cntid: 0, csi: 0 };
        self.read(what, ask.encode(), Identify::DATA_BYTES).await
    }

    /// The same; `None` where the controller does not know the page.
    pub(crate) async fn identify_if_known(&self, cns: Cns, nsid: u32) -> Result<Option<Buffer>, ConnectError> {
        match self.identify(cns, nsid).await {
            Ok(page) => Ok(Some(page)),
            Err(ConnectError::Refused { status, .. })
                if matches!(status.code(), StatusCode::INVALID_FIELD | StatusCode::INVALID_OPCODE) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Part of a log page, as long as asked for.
    pub(crate) async fn log(&self, what: &'static str, ask: GetLogPage) -> Result<Buffer, ConnectError> {
        self.read(what, ask.encode(), ask.length_bytes as usize).await
    }

    /// The same; `None` where the controller refuses it or sends less.
    pub(crate) async fn log_if_known(
        &self,
        what: &'static str,
        ask: GetLogPage,
    ) -> Result<Option<Buffer>, ConnectError> {
        match self.log(what, ask).await {
            Ok(page) => Ok(Some(page)),
            Err(ConnectError::Refused { .. } | ConnectError::Unexpected { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
