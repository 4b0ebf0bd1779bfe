"""Take the pictures of the report that docs/images holds: `hyperball report results/`, then `python docs/pictures.py`.

Needs Playwright and a Chromium on the path.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

PAGE, IMAGES = Path("report.html"), Path(__file__).parent / "images"
DESKTOP, PHONE = (1400, 1000), (390, 844)
PICTURES = {  # theme, size, the part of the page that stands at the top
    "light": ("light", DESKTOP, ""),
    "dark": ("dark", DESKTOP, ""),
    "phone": ("light", PHONE, ""),
    "table": ("light", DESKTOP, "dcnet-table3-paper"),
    "figures": ("light", DESKTOP, "ours-against-the-papers"),
}


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for name, (theme, (width, height), part) in PICTURES.items():
            page = chromium.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
            page.goto(f"{PAGE.resolve().as_uri()}?theme={theme}#{part}")
            page.wait_for_timeout(2000)  # milliseconds until a long page is drawn there
            page.screenshot(path=IMAGES / f"report-{name}.png")
        chromium.close()


if __name__ == "__main__":
    main()
