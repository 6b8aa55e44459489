//! A logical unit: its information about itself, and commands, which are sent again if that may help.

use std::time::Duration;

use sealblock_block::Error;
use sealblock_protocols_scsi::{
    BlockCharacteristics, BlockLimits, CachingPage, Command, ControlPage, ExtendedInquiry, Inquiry, ModeSense, Page,
    Provisioning, ReadCapacity16, designators, text,
};
use sealblock_runtime_memory::Buffer;
use sealblock_runtime_reactor::{Transfer, sleep};

use super::answer::{AnswerClass, AnswerText, is_unexecuted};
use super::transport::{Answer, OpenError, Transport};
use crate::node::call_error;

/// How often a command is sent again after a reply that allows it, and the pause before.
const RETRIES: u32 = 5;
const RETRY_PAUSE: Duration = Duration::from_millis(10);
/// Bytes that are requested of a page: more than any page here has.
const PAGE_BYTES: u16 = 1024;

/// A logical unit.
pub(crate) struct Unit<T> {
    pub(crate) transport: T,
}

/// The information of a logical unit about itself.
#[derive(Clone, Debug)]
pub(crate) struct Pages {
    pub(crate) inquiry: Inquiry,
    pub(crate) serial: String,
    /// The designator of the logical unit: its NAA or EUI-64 name before others.
    pub(crate) name: Option<String>,
    pub(crate) extended: ExtendedInquiry,
    pub(crate) limits: BlockLimits,
    pub(crate) characteristics: BlockCharacteristics,
    pub(crate) provisioning: Provisioning,
    pub(crate) capacity: ReadCapacity16,
    pub(crate) caching: Option<CachingPage>,
    pub(crate) control: ControlPage,
}

impl<T: Transport> Unit<T> {
    /// Sends an idempotent command, again while its reply allows it; returns its final reply.
    pub(crate) async fn execute(&self, doing: &str, command: &Command, data: Transfer) -> Result<Answer, Error> {
        let (result, _) = self.send(command, data, |_| true).await;
        result.map_err(|error| call_error(doing, &error))
    }

    /// Sends a command that must not be executed twice: again only if it was not executed.
    pub(crate) async fn execute_once(&self, command: &Command, data: Transfer) -> std::io::Result<Answer> {
        self.send(command, data, is_unexecuted).await.0
    }

    /// Sends a command, and again while its reply and `may_repeat` allow it.
    async fn send(
        &self,
        command: &Command,
        mut data: Transfer,
        may_repeat: impl Fn(&Answer) -> bool,
    ) -> (std::io::Result<Answer>, Transfer) {
        let cdb = command.encode().expect("limits are those of the command's form");
        let mut retries = 0;
        loop {
            let (result, returned) = self.transport.send(&cdb, data).await;
            let is_final = match &result {
                Ok(answer) => AnswerClass::of(answer) != AnswerClass::Again || !may_repeat(answer),
                Err(_) => true,
            };
            if is_final || retries == RETRIES {
                return (result, returned);
            }
            retries += 1;
            data = returned;
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Sends a command at opening time; an error means that there is no reply.
    pub(crate) async fn try_command(
        &self,
        what: &'static str,
        command: &Command,
        data: Transfer,
    ) -> Result<(Answer, Transfer), OpenError> {
        let (result, data) = self.send(command, data, |_| true).await;
        result.map(|answer| (answer, data)).map_err(|error| OpenError::call_error(what, error))
    }

    /// The data that a command returns, as many as were transferred; or the reply of one that failed.
    async fn read(
        &self,
        what: &'static str,
        command: &Command,
        length: u16,
    ) -> Result<Result<Vec<u8>, Answer>, OpenError> {
        let (answer, data) = self.try_command(what, command, Transfer::In(Buffer::zeroed(usize::from(length)))).await?;
        match (AnswerClass::of(&answer), data) {
            (AnswerClass::Good, Transfer::In(buffer)) => {
                Ok(Ok(buffer[..answer.moved_bytes.min(buffer.len())].to_vec()))
            }
            (AnswerClass::Good, _) => Ok(Ok(Vec::new())),
            _ => Ok(Err(answer)),
        }
    }

    /// The body of a page of vital product data; empty if the device has none.
    async fn page(&self, has: &[u8], code: u8) -> Result<Vec<u8>, OpenError> {
        const WHAT: &str = "INQUIRY, a page of vital product data";
        if !has.contains(&code) {
            return Ok(Vec::new());
        }
        let command = Command::Inquiry { page: Some(code), allocation_bytes: PAGE_BYTES };
        let bytes = self.read(WHAT, &command, PAGE_BYTES).await?.unwrap_or_default();
        Ok(Page::decode(code, &bytes).ok().flatten().map(|page| page.body.to_vec()).unwrap_or_default())
    }

    /// A mode page; `None` if the device has none.
    async fn mode_page(&self, code: u8) -> Result<Option<Vec<u8>>, OpenError> {
        const BYTES: u16 = 252;
        let command =
            Command::ModeSense { page: code, subpage: 0, disable_block_descriptors: true, allocation_bytes: BYTES };
        let Ok(bytes) = self.read("MODE SENSE (10)", &command, BYTES).await? else { return Ok(None) };
        Ok(ModeSense::decode(&bytes).ok().and_then(|mode| mode.page(code)).map(<[u8]>::to_vec))
    }

    /// Reads all pages.
    pub(crate) async fn pages(&self) -> Result<Pages, OpenError> {
        const BYTES: u16 = Inquiry::BYTES as u16;
        let refused = |what: &'static str, answer: Answer| {
            OpenError::Unsuitable(format!("the drive answered {what} with {}", AnswerText(&answer)))
        };
        let unreadable = |error: sealblock_protocols_scsi::TooShort| OpenError::Unsuitable(error.to_string());
        let inquiry = Command::Inquiry { page: None, allocation_bytes: BYTES };
        let inquiry = self.read("INQUIRY", &inquiry, BYTES).await?.map_err(|answer| refused("INQUIRY", answer))?;
        let inquiry = Inquiry::decode(&inquiry).map_err(unreadable)?;
        const CAPACITY: &str = "READ CAPACITY (16)";
        let capacity = Command::ReadCapacity16 { allocation_bytes: ReadCapacity16::BYTES as u32 };
        let capacity = self.read(CAPACITY, &capacity, ReadCapacity16::BYTES as u16).await?;
        let capacity =
            ReadCapacity16::decode(&capacity.map_err(|answer| refused(CAPACITY, answer))?).map_err(unreadable)?;
        let has = self.page(&[Page::SUPPORTED], Page::SUPPORTED).await?;
        let ids = self.page(&has, Page::IDENTIFICATION).await?;
        let of_unit = || designators(&ids).filter(|id| id.association == 0);
        let name = of_unit().find(|id| id.kind == 3).or_else(|| of_unit().find(|id| id.kind == 2));
        Ok(Pages {
            inquiry,
            serial: text(&self.page(&has, Page::SERIAL).await?),
            name: name.map(|id| id.name()),
            extended: ExtendedInquiry::decode(&self.page(&has, Page::EXTENDED_INQUIRY).await?),
            limits: BlockLimits::decode(&self.page(&has, Page::BLOCK_LIMITS).await?),
            characteristics: BlockCharacteristics::decode(&self.page(&has, Page::BLOCK_CHARACTERISTICS).await?),
            provisioning: Provisioning::decode(&self.page(&has, Page::PROVISIONING).await?),
            capacity,
            caching: self.mode_page(CachingPage::CODE).await?.as_deref().and_then(CachingPage::decode),
            control: self
                .mode_page(ControlPage::CODE)
                .await?
                .as_deref()
                .and_then(ControlPage::decode)
                .unwrap_or_default(),
        })
    }
}
