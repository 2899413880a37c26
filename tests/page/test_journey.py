"""A project from a file with faults to two runs side by side, in a real browser that is closed and opened twice."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.page.opened import Page, opened
from tests.support.chaos.project import wait_for

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.common.exceptions import WebDriverException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="Chromium or its driver is not installed")
ROWS = "".join(f"What is the sum of {n} and {n + 1}?,It is {2 * n + 1}.\n" for n in range(60))
FAULTS = "Whatâ€™s a cafÃ©?,It is a place.\nWhat is the sum of 3 and 4?,It is 7.\nHello?,\n"
WIDE, NARROW = 1280, 360


class Browser:
    """A person before the page."""

    def __init__(self, page: Page, language: str = "en") -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        for word in (
            "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
            f"--accept-lang={language}",
        ):  # fmt: skip
            options.add_argument(word)
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        self.page = page
        self.resize(WIDE)
        self.visit(page.address)

    def visit(self, address: str) -> None:
        """Open an address, and wait until its buttons work."""
        self.driver.get(address)
        self.wait_for_script("document.querySelector('form[data-htmx-powered]') !== null")

    def wait_for_script(self, condition: str) -> None:
        wait_for(lambda: bool(self.driver.execute_script(f"return {condition}")), condition, 30)

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == NARROW}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def text(self, name: str) -> str:
        """The text of an element, by its id."""
        with suppress(WebDriverException):  # it has just been replaced
            return str(self.driver.find_element(By.ID, name).text)
        return ""

    def wait_for_state(self, state: str, seconds: float = 90) -> None:
        self._wait(lambda: self.text("state") == state, f"the state {state}", "run", seconds)

    def wait(self, name: str, text: str, seconds: float = 90) -> None:
        self._wait(lambda: text in self.text(name), repr(text), name, seconds)

    def _wait(self, condition: Callable[[], bool], what: str, name: str, seconds: float) -> None:
        try:
            wait_for(condition, what, seconds)
        except RuntimeError as error:
            raise AssertionError(f"{error}; {name} is: {self.text(name)[:3000]}") from None

    def press(self, section: str, label: str) -> None:
        def pressed() -> bool:
            with suppress(WebDriverException):
                buttons = self.driver.find_elements(By.CSS_SELECTOR, f"#{section} button")
                button = next(each for each in buttons if each.text == label and each.is_enabled())
                self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", button)
                button.click()
                return True
            return False

        wait_for(lambda: self.has_button(section, label) and pressed(), f"the button {label}", 60)

    def has_button(self, section: str, label: str) -> bool:
        with suppress(WebDriverException):
            buttons = self.driver.find_elements(By.CSS_SELECTOR, f"#{section} button")
            return any(each.text == label and each.is_enabled() for each in buttons)
        return False

    def type(self, name: str, text: str) -> None:
        box = self.driver.find_element(By.ID, name)
        box.clear()
        box.send_keys(text)

    def log(self, kind: str) -> list[Any]:
        return list(self.driver.get_log(kind))

    def close(self) -> None:
        """Close it; nothing in it may have gone wrong."""
        said = [each["message"] for each in self.log("browser") if each["level"] == "SEVERE"]
        self.driver.quit()
        assert said == []


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAFETRAIN_LOCK_DIR", str(tmp_path_factory.mktemp("lock")))
        with opened(tmp_path_factory.mktemp("journey")) as served:
            yield served


@pytest.fixture
def browse(page: Page) -> Iterator[Callable[..., Browser]]:
    open_now = list[Browser]()

    def browse(language: str = "en") -> Browser:
        open_now.append(Browser(page, language))
        return open_now[-1]

    yield browse
    for each in open_now:
        with suppress(WebDriverException):
            each.driver.quit()


def worker_of(page: Page) -> psutil.Process:
    def found() -> list[psutil.Process]:
        own = list[psutil.Process]()
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if "safetrain.engine.worker" in process.cmdline() and process.cwd() == str(page.folder):
                    own.append(process)
        return own

    wait_for(lambda: bool(found()), "the training process", 60)
    return found()[0]


def test_from_a_file_with_faults_to_two_runs(page: Page, browse: Callable[..., Browser], tmp_path: Path) -> None:
    first = browse()
    rows = tmp_path / "sums.csv"
    rows.write_text(f"prompt,completion\n{ROWS}{FAULTS}", encoding="utf-8")
    first.driver.find_element(By.ID, "file").send_keys(str(rows))
    for finding, place, text in (
        ("ROW-UNREADABLE", "row 63 (line 64)", '"Hello?"'),
        ("MOJIBAKE", "row 61 (line 62)", "Whatâ€™s a cafÃ©?"),
        ("REPEATED-ROWS", "row 62 (line 63) matches", "It is 7."),
    ):
        first.wait("data", finding)
        assert place in first.text("data")
        assert text in first.text("data")
    first.press("data", "Write a repaired copy")
    first.wait("data", "data/sums-repaired.jsonl: 61 rows")
    assert "No findings in the rows." in first.text("data")
    repaired = (page.folder / "data/sums-repaired.jsonl").read_text(encoding="utf-8")
    assert "What's a café?" in repaired.replace("’", "'")
    first.press("data", "Train on this data")
    first.wait("data", "This is the data of the project.")
    first.wait("plan", "predicted peak")
    first.type("value-train.num_epochs", "80\n")
    first.wait("plan", "set by you")
    params = (page.folder / "params.yaml").read_text(encoding="utf-8")
    assert "num_epochs: 80" in params
    assert "# 1.. passes over the training rows" in params
    first.press("run", "Train")
    first.wait_for_state("training")
    wait_for(lambda: "% · training" in first.driver.title, "the title", 30)
    first.close()

    os.kill(worker_of(page).pid, signal.SIGKILL)
    second = browse()
    second.wait_for_state("died")
    assert "killed from outside (SIGKILL); memory was not the cause" in second.text("run")
    assert "safetrain run --name=num_epochs-80" in second.text("run")
    second.wait("stages", "failed")
    second.press("run", "Continue")
    second.wait_for_state("training")
    second.close()

    third = browse("pt-BR")
    third.wait_for_state("concluído", 300)
    third.wait("result", "better by")
    third.wait("result", "Voltar a esta execução", 240)  # recorded, so the run is over
    third.type("question", "What is the sum of 3 and 4?")
    third.press("result", "Perguntar")
    third.wait("answers", "treinado")
    third.wait("answers", "It is")
    third.visit(f"http://{page.host}/?lang=en")
    third.type("value-train.learning_rate", "0.003\n")
    third.wait("run", "safetrain run --name=learning_rate-0.003_num_epochs-80")
    third.type("run-name", "faster")
    third.press("run", "Train")
    third.wait("result", "safetrain runs --back=faster", 240)
    table = third.text("result").partition("Runs\n")[2]
    assert "train.learning_rate=null" in table.replace("None", "null").replace("train.learning_rate= ", "")
    third.press("result", "Back to this run")
    third.wait("said", "params.yaml and checkpoints_qlora are those of")
    messages = [each["message"] for each in third.log("performance")]
    sent = [message for message in messages if '"Network.requestWillBeSent"' in message]
    assert len(sent) > 5
    assert all(f"http://{page.host}/" in message or '"url":"data:' in message for message in sent)
    third.close()


def test_it_fits_a_telephone_and_shows_no_row_as_markup(page: Page, browse: Callable[..., Browser]) -> None:
    evil = '{"prompt": "<img src=x onerror=alert(1)>", "completion": "<script>alert(2)</script>"}\n'
    (page.folder / "data/evil.jsonl").write_text(evil * 2)
    narrow = browse()
    narrow.resize(NARROW)
    narrow.type("check-path", "data/evil.jsonl")
    narrow.press("data", "Check")
    narrow.wait("data", "<script>alert(2)</script>")  # as text: an alert would stop the driver
    for width in (NARROW, 720, WIDE, 1600):
        narrow.resize(width)
        assert narrow.driver.execute_script("return document.documentElement.scrollWidth <= innerWidth"), width
    narrow.close()


def test_the_keyboard_reaches_every_button(page: Page, browse: Callable[..., Browser]) -> None:
    seen = browse()
    seen.wait("plan", "train.learning_rate")
    reached = seen.driver.execute_script(
        "return [...document.querySelectorAll('button,a,input:not([type=hidden]),select,summary')]"
        ".filter((each) => each.tabIndex < 0).map((each) => each.outerHTML)"
    )
    assert reached == []
    unnamed = seen.driver.execute_script(
        "return [...document.querySelectorAll('button,input:not([type=hidden]),select')]"
        ".filter((each) => !each.textContent.trim() && !each.labels?.length && !each.ariaLabel)"
        ".map((each) => each.outerHTML)"
    )
    assert unnamed == []
    seen.close()
