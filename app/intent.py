"""What a query says about time: whether it wants what holds now, asks about the past, names a time or a version.

Pure: the origin comes in. A closed grammar of forms in English, Chinese and Japanese, read left to right, longest form
first. It prefers silence to a guess: a number that only might be a year is marked as unsure, `RFC 2020`, `ISO 8601`,
`CVE-2020-1234`, `top 10` and "may I" are not times.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from app.times import from_ms, to_ms

Wants = Literal["current", "past", "time", "any"]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time that a query names, from `start_ms` up to but without `end_ms`.

    `sure` is False for a bare number that may be a year ("the 2019 novel"): reason enough not to prefer what is new,
    but not to prefer what is from then.
    """

    start_ms: int
    end_ms: int
    text: str
    sure: bool = True


@dataclass(frozen=True, slots=True)
class Intent:
    """What a query says about time; `cue` is the word or form that decided, "" where nothing did."""

    wants: Wants
    cue: str = ""
    spans: tuple[Span, ...] = ()
    versions: tuple[str, ...] = ()


LONGEST_READ: Final = 2_000
"""Characters of a query that are read for times: a longer one is a document, and what it names is not what it asks."""


def read_intent(query: str, *, origin_ms: int) -> Intent:
    """Return what the query says about time, as seen from the origin (civil days of UTC).

    A named time wins over words: "latest news in March 2020" asks about then. A span that reaches the origin ("this
    year", "last 3 days") is a named time too. Times that begin after the origin are no times to look in.
    """
    text = unicodedata.normalize("NFKC", query[:LONGEST_READ]).casefold()
    origin = from_ms(origin_ms)
    read = _ACROSS.sub(lambda match: _BLANK * len(match[0]), text)
    spans = tuple(span for span in _joined(read, _spans(read, origin)) if span.start_ms <= origin_ms)
    versions = tuple(dict.fromkeys(match[1] for match in _VERSION.finditer(text)))
    sure = [span for span in spans if span.sure]
    if sure:
        return Intent("time", sure[0].text, spans, versions)
    words = _NO_TIME.sub("|", text)
    if match := _PAST.search(words):
        return Intent("past", match[0], spans, versions)
    if match := _CURRENT.search(words):
        return Intent("current", match[0], spans, versions)
    return Intent("any", "", spans, versions)


# --- words ---------------------------------------------------------------------------------------------------------------

# What reads like a cue and is none: taken out before cues are looked for. Found by reading what the cues below say of
# thousands of questions that have nothing to do with time.
_NO_TIME: Final = re.compile(
    # The current of electricity and water, and that of a running program.
    r"\b(?:(?:electric|alternating|direct|eddy|ocean|phase|leakage|ac|dc|high|low|voltage|rip|tidal|inrush|short[- ]circuit)"
    r" currents?"
    r"|current (?:densit|flow|source|voltage|loop|account|transformer|transistor|limit|sens|carr|distribut|measur|sheet"
    r"|mirror|divider|rating)"
    r"|current (?:(?:working )?director(?:y|ies)|folder|user|thread|branch|row|cursor|url|timestamp|locale|element|tab|window)\b"
    # Kept as it is, whatever there is.
    r"|(?:keep|keeps|kept|keeping|bring|brought)(?: [\w'-]+){0,6} up[- ]to[- ]date\b"
    r"|at the latest\b|recent common ancestors?\b|usa today\b|apocalypse now\b|still (?:life|image|photo|born)"
    # Of parts and groups, whatever the time: "the former Yugoslavia" is a region, "former employees" are people.
    r"|former (?:yugoslav|soviet|ussr|czechoslovak|east german|german democratic|ottoman|(?:\w+ )?republics?\b|colon(?:y|ies)\b"
    r"|employees?\b|students?\b|members?\b|spouses?\b|smokers?\b|prisoners?\b)"
    r"|(?:family|medical|personal) history of|oldest (?:living|working|active|surviving)\b"
    r"|previously (?:published|reported|described|known|unknown|saved|deleted|installed|viewed|mentioned|stated)\b)"
    # Chinese cues that two words make between them: the last two characters of "it appears in" read "now".
    r"|[出呈体體表发發实實展再涌浮兑兌][现現][在行任]"
    r"|(?<=[项項节節])目(?=前(?:期(?![货貨权權])|景|端|后|後|台))|附近[日来來期]|[临臨接将將]近期"
    r"|[适適恰相][当當](?:时|時)|(?:应|應|正)[当當](?:时|時)(?=[刻机機间間])|[当當](?:时间|時間)|[应應][当當]前(?=[往台])"
    r"|以前(?=年度)|[可足难難]以前(?=[往进進来來去行])|[从從]前(?=[台面端往后後门門排方厅廳])|[不通经經超路][过過]往(?=往|返|来|來)"
    r"|的[历歷]史(?=[记記][录錄]|订单|訂單|消息)"
    # The nearest neighbour, and what is called after now and then.
    r"|最近(?:邻|鄰|傍|接|公共|最少)|least recently\b|(?:most )?recently used\b"
    r"|昔(?:ながら|話|ばなし)|今昔|当初予算|現在(?:地|完了|進行)"
    r"|\b(?:browser|browsing|search|chat|call|command|commit|edit|revision|version|purchase|order|payment|travel|employment|credit)"
    r" history of\b"
    # The nearest place, not the last days.
    r"|(?:距[离離]?|[离離](?:我|家|这|這|公司))[^，。？?]{0,20}?最近"
    r"|最近的(?:地铁|地鐵|火车|火車|公交|高铁|高鐵|加油)?(?:站|机场|機場|医院|醫院|港口|药店)(?=在|怎|有|是|$|[？?])"
    r"|早期(?:阶段|階段|诊断|診斷|筛查|篩查|症状|症狀|治疗|治療|干预|預警|预警|教育)"
    r"|[报報][纸紙]?的?第一版|の歴史的|昔から|现行犯|現行犯"
)
_CURRENT: Final = re.compile(
    r"\b(?:latest|newest|(?:most )?recent(?:ly)?|up[- ]to[- ]date|nowadays|currently|right now|now(?=\s*[?!.]*$)"
    r"|as of (?:now|today)|today(?:'s)?|these days|at the moment|at present|ongoing"
    # Not "what is New York known for".
    r"|what(?:'s| is) new(?=\s*(?:$|[?!.,]|(?:in|with|for|at|about|on|from|since|here)\b))"
    r"|(?:is|are|does|do|can|may|must)(?: [\w'-]+){1,6} still(?= \w)"
    r"|current(?=\s+\w))\b"
    r"|最新|目前|现在|現在|当前|當前|如今|最近|近期|近日|眼下|现任|現任|现行|現行|近来|近來|眼前|现阶段"
    r"|还(?!有|是)[^，。？?]{1,12}吗|新着|直近"
)
_PAST: Final = re.compile(
    r"\b(?:histor(?:y|ical|ically) of|the history(?= (?:behind|and|in)\b)|originally|formerly|previously|used to be|back then"
    r"|at that time|in those days|in the past|once was|earliest|oldest|(?:first|initial) (?:version|edition|release)"
    # Not "what is it used to treat", "which steel used to make knives".
    r"|former(?! and\b)(?= \w)|(?<!is )(?<!are )(?<!was )(?<!were )(?<!be )(?:who|he|she|they|we|people|there) used to"
    r"|(?:where|how) (?:the |my |our )?[\w'-]+ used to"
    r"|did (?:[\w'-]+ ){1,3}use to|early days"
    r"|the origins of(?! species)|the origin of (?:the |this )?(?:word|name|term|phrase|expression|custom|tradition)s?"
    r"|ex-(?:president|minister|ceo))\b"
    # "Which of these came first" (哪个最早) compares events, whenever they were.
    r"|(?<!是)最早的"
    r"|当时|當時|曾经|曾經|历史上|歷史上|的历史|的歷史|起初|最初|早期|那时|那時|以前|从前|從前|旧版|舊版"
    r"|前任|起源|由来|第一版|过往"
    r"|かつて|もともと|当初|の歴史|昔"
)
# A number with a point in it that stands alone or behind a name: 5.1, v2, 3.0.11, 4.0.0-rc.2; not 3.5%, $2.50 or 1.5e3.
_VERSION: Final = re.compile(
    r"(?<![\w.$€£¥,/-])(?:v(?=\d)|version\s*|版本\s*)?(\d{1,4}(?:\.\d{1,5}){1,3}(?:-?(?:rc|beta|alpha|ga)[.-]?\d{0,3})?)"
    r"(?![\w%‰]|[.,]\d|\s*(?:%|percent|per cent))(?=\b|[^\d])"
    r"|(?<![\w.])v(\d{1,4})(?![\w.])"
)

# --- words whose borders look like times ----------------------------------------------------------------------------------

_BLANK: Final = "\x1f"
"""Stands where such a word stood, so that places in the query stay the same; no form takes it."""

# Chinese and Japanese set no spaces: 目前年利率 holds 前年, 工资本月发 holds no 资本. So whole words are taken out whose last
# character, with the next word's first, would read as a time, each with what makes it no word where it is none.
_ACROSS: Final = re.compile(
    # …前 + 年, 天, 周; 学生前年 and 大学前天 are two words each.
    r"(?:(?<![项項])目|(?<![所可足难難])以|之|(?<![应應])[当當]|眼|提|此|面|(?<![学學医醫先卫衛考新招师師花产產])生|[税稅]|(?<![结結离離再])婚"
    r"|(?<![同大小中开開入放])[学學]|(?<![生房投财財资資破停量])[产產]|(?<![手技艺藝美])[术術]|[饭飯]|餐|(?<![高中大期月])考|(?<![上下])[课課]"
    r"|(?<![比决決大])[赛賽]|睡|(?<!太)空|跟|超)前(?=[年天周週月])"
    # …今 + 年, 天, 晚: "for instance this year" and "to find today's" are no such words.
    r"|(?:(?<![例比假譬正诸諸何])如|(?<![应應相])[当當]|(?<![出发發实實呈体體表兑兌])[现現])今(?=[年天晚日周週月])"
    r"|(?<=[迄至])今(?=日本)|今(?=年[轻輕](?!松|鬆))"
    # …去 + 年
    r"|(?<![不通经經超])[过過]去(?=年[份度])|[失除减減扣]去(?=年[薪费費金])"
    # …本 + 年, 月, 周, 季度: 今日本店, 工资本月 and 完成本周 are no such words.
    r"|(?:(?<![今昨明生近每当當次同假节節作周週期曜平元])日|(?<![工投外合独獨师師邮郵])[资資]|(?<![完达達分提构構生养養形组組造])成"
    r"|(?<!出)版|(?<![一同这這那怎])[样樣]|(?<![上下停网網听聽])[课課]|基|根|(?<![视視电電话話])[剧劇]|[脚腳]|副|(?<![平高草])原|[笔筆][记記]|(?<![论論公作征徵语語中英原散发發])文)本(?=[年月周週季])"
    # …上 + 周, 月, 年: "from one year up to and without two", but not "by last month's pay".
    r"|(?:(?<![号號])[线線]|(?<![官联聯])[网網]|晚|早|[马馬]|历史|歷史|理论|理論|实际|實際|基本|[传傳][统統]|原[则則])上(?=[周週月个個星一季])"
    r"|(?<=[\d年月天日个個元岁歲人周週万萬千百次名])以上(?=[周週月个個一])"
    # …先 + 月
    r"|[首优優领領预預事率]先(?=[月周週])"
    # "Nearly three years" is how long, 附近三天 is where.
    r"|[接将將附靠邻鄰临臨远遠]近(?=[\d一二三四五六七八九十两兩])"
    # Names.
    r"|今日(?=[头頭][条條]|说法|本(?![店院社校市司周週月年]))|昨日(?=重[现現])"
    # What comes back every year, or is to come.
    r"|(?:每|毎|次|翌|[来來]|明|[后後]|第二)年[的の]\s?\d{1,2}月(?:\d{1,2}[日号號])?"
    # The month of something else: "of the month of leaving".
    r"|(?<=[\u4e00-\u9fff])(?<![在从從自于於到至和及与與的，])[当當]月"
)

# --- times ---------------------------------------------------------------------------------------------------------------

_MONTHS: Final = {
    name: number
    for number, names in enumerate(
        (
            "january jan", "february feb", "march mar", "april apr", "may", "june jun", "july jul", "august aug",
            "september sept sep", "october oct", "november nov", "december dec",
        ),
        start=1,
    )
    for name in names.split()
}  # fmt: skip
_MONTH: Final = r"(january|february|march|april|may|june|july|august|september|october|november|december|jan|feb|mar|apr|jun|jul|aug|sept|sep|oct|nov|dec)\b\.?"
_WORDS: Final = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "eleven": 11, "twelve": 12,
    "a": 1, "an": 1, "a couple of": 2, "first": 1, "second": 2, "third": 3, "fourth": 4, "last": 4,
}  # fmt: skip
_COUNT: Final = r"(\d{1,3}|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|a couple of|an?)"
_DIGITS: Final = {
    **dict(zip("〇零一二三四五六七八九", (0, 0, *range(1, 10)), strict=True)), "两": 2, "兩": 2,
}  # fmt: skip
_HAN_NUMBER: Final = r"(?:\d{1,3}|[一二三四五六七八九十两兩]{1,3})"
_HAN: Final = f"({_HAN_NUMBER})"
_YEAR: Final = r"((?:1[0-9]|20|21)\d\d)"
_NOT_IN_NAME: Final = r"(?<![\w.\-/#$€£])"
_UNIT: Final = (
    r"(?:euros?|eur|dollars?|usd|gbp|pounds?|sterling|yen|jpy|yuan|rmb|cny|francs?|chf|crowns?|rupees?|rubles?|cents?|credits|pesos?"
    r"|words?|characters?|chars|tokens|pixels?|px|bytes?|bits?|kb|mb|gb|tb|kib|mib|gib"
    r"|miles?|kilomet(?:er|re)s?|km|met(?:er|re)s|feet|ft|inch(?:es)?|yards?|cm|mm|nm|grams?|kg|mg|mcg|kilos?|lbs?|tons?|tonnes?"
    r"|lit(?:er|re)s?|ml|gallons?|acres|hectares|square|sq|sqm|cubic|degrees|calories|kcal|kj"
    r"|hours?|hrs?|minutes?|mins?|seconds?|secs?|ms|milliseconds?|days|weeks|months|years|times"
    r"|watts?|kw|kwh|mwh?|volts?|amps?|hp|rpm|cc|hz|khz|mhz|ghz|dpi|ppm|iu|psi|lumens|percent|per cent|iterations|attempts|retries|tries)"
)
# Behind a number: it counts something, so it is no year. "2000 euros", "1500 €", the 1500 of "1500 to 2000 words".
_COUNTS: Final = (
    rf"(?!\s?[€$£¥%°]|[\s-]{_UNIT}\b"
    rf"|\s?(?:-|–|to|and|or)\s?[$€£¥]?\d[\d,.]*k?(?:\s?[€$£¥%°]|[\s-]?{_UNIT}\b))"
)
_TIMING: Final = (
    r"(?!\s+(?:time-?outs?|time limit|limit|delay|interval|window|wait|mark|rule|retry|retries|default|period|ttl|deadline|cool-?down"
    r"|countdown|pause|poll(?:ing)?|read|connect(?:ion)?|request|grace|threshold|budget|lag|cache|sleep|back-?off|keep-?alive|refresh"
    r"|heartbeat|lease|maximum|max|minimum|cap|clip|video|ad|timer|expiry|gap|response|latency|session|probe|scrape)\b)"
)
_WEEKDAYS: Final = {
    "monday": 0, "tuesday": 1, "wednesday": 2, "thursday": 3, "friday": 4, "saturday": 5, "sunday": 6,
}  # fmt: skip
_WEEKDAY: Final = r"(monday|tuesday|wednesday|thursday|friday|saturday|sunday)"
_HAN_WEEKDAYS: Final = dict(zip("一二三四五六日天末", (0, 1, 2, 3, 4, 5, 6, 6, 5), strict=True))
_UNITS: Final = {
    "day": "d",
    "week": "w",
    "month": "m",
    "year": "y",
    "quarter": "q",
    "hour": "h",
    "decade": "10y",
}
_HAN_UNITS: Final = {
    "天": "d", "日": "d", "周": "w", "週": "w", "星期": "w", "週間": "w", "月": "m", "年": "y", "小时": "h", "小時": "h",
    "時間": "h", "季度": "q",
}  # fmt: skip

_Bounds = tuple[datetime, datetime]


def _at(year: int, month: int = 1, day: int = 1) -> datetime:
    return datetime(year, month, day, tzinfo=UTC)


def _months(year: int, month: int, count: int = 1) -> _Bounds:
    """Return `count` months from the first of one; months beyond 1 to 12 fall into the years around."""
    first, after = year * 12 + month - 1, year * 12 + month - 1 + count
    return _at(first // 12, first % 12 + 1), _at(after // 12, after % 12 + 1)


def _years(year: int, count: int = 1) -> _Bounds:
    return _at(year), _at(year + count)


def _day(year: int, month: int, day: int) -> _Bounds:
    first = _at(year, month, day)
    return first, first + timedelta(days=1)


def _midnight(moment: datetime) -> datetime:
    return moment.replace(hour=0, minute=0, second=0, microsecond=0)


def _unit(origin: datetime, unit: str, back: int) -> _Bounds:
    """Return the calendar unit that lies `back` units before the origin's own."""
    today = _midnight(origin)
    if unit in ("d", "h"):
        first = today - timedelta(days=back if unit == "d" else back // 24)
        return first, first + timedelta(days=1)
    if unit == "w":
        first = today - timedelta(days=today.weekday() + 7 * back)
        return first, first + timedelta(days=7)
    if unit == "m":
        return _months(origin.year, origin.month - back)
    if unit == "q":
        return _months(origin.year, (origin.month - 1) // 3 * 3 + 1 - 3 * back, 3)
    step = 10 if unit == "10y" else 1
    return _years(origin.year - step * back)


def _since(origin: datetime, unit: str, back: int) -> _Bounds:
    """Return the last `back` units up to the end of the origin's day."""
    days = {"h": 1 / 24, "d": 1, "w": 7, "m": 30.44, "q": 91.31, "y": 365.25, "10y": 3652.5}[unit] * back
    end = _midnight(origin) + timedelta(days=1)
    return _midnight(origin - timedelta(days=days)), end


def _last_time(origin: datetime, month: int, day: int | None = None) -> _Bounds:
    """Return the newest such month or day that has begun by the origin."""
    for year in range(origin.year, origin.year - 9, -1):
        try:
            bounds = _months(year, month) if day is None else _day(year, month, day)
        except ValueError:
            continue
        if bounds[0] <= origin:
            return bounds
    raise ValueError("no such day")


def _number(text: str) -> int:
    if text in _WORDS:
        return _WORDS[text]
    if text.isascii():
        return int(text)
    tens, ten, ones = text.rpartition("十")
    if not ten:
        return int("".join(str(_DIGITS[digit]) for digit in text))
    return 10 * (_DIGITS[tens] if tens else 1) + (_DIGITS[ones] if ones else 0)


def _part(year: int, rest: str) -> _Bounds:
    """Return the part of a year that Chinese and Japanese forms name behind it; the whole year for none."""
    if match := re.fullmatch(rf"的?{_HAN}月(?:份|的)?{_HAN}[日号號]", rest):
        return _day(year, _number(match[1]), _number(match[2]))
    if match := re.fullmatch(rf"的?{_HAN}月(.*)", rest):
        first, after = _months(year, _number(match[1]))
        tenth = {
            "上旬": (0, 10),
            "初": (0, 10),
            "中旬": (10, 20),
            "下旬": (20, 31),
            "底": (20, 31),
            "末": (20, 31),
        }
        if match[2] in tenth:
            early, late = tenth[match[2]]
            return first + timedelta(days=early), min(after, first + timedelta(days=late))
        return first, after
    if match := re.fullmatch(r"的?(?:第)?([一二三四1-4])(?:个)?(?:季度|四半期)", rest):
        return _months(year, 3 * _number(match[1]) - 2, 3)
    halves = {
        "上半年": (1, 6),
        "下半年": (7, 6),
        "上半期": (1, 6),
        "下半期": (7, 6),
        "春": (3, 3),
        "夏": (6, 3),
        "秋": (9, 3),
    }
    for name, (month, count) in {
        **halves,
        "年初": (1, 3),
        "初": (1, 3),
        "年底": (11, 2),
        "底": (11, 2),
        "末": (11, 2),
        "年末": (11, 2),
    }.items():
        if rest.removeprefix("的") == name:
            return _months(year, month, count)
    return _years(year)


_REST: Final = (
    rf"((?:的?{_HAN_NUMBER}月(?:(?:份|的)?{_HAN_NUMBER}[日号號]|份|上旬|中旬|下旬|初|底|末)?"
    r"|的?第?[一二三四1-4]个?(?:季度|四半期)|的?[上下]半[年期]|的?年[初底末]|[初底末]|的?[春夏秋])?)"
)
# "A year ago" ends there: 三年前端经验 is experience in the front end, 三天前后 is about then, and Japanese 3日前までに is a
# deadline; 3日前までは is not.
_AGO: Final = r"前(?!端|台|[后後]|往|任|排|景|期(?![货貨间間])|提(?:条|條|下|是)|置|まで(?!は|[^。、？?]{0,10}た(?:[。、か]|$))|倒し|払い)"
_WEEK: Final = r"(?:周(?!期(?![货貨末中间間])|转(?![账帐正发让岗入出到])|轉(?![帳正發讓入出到])|[围圍](?![绕繞棋])|[边邊](?!境)|折|刊|杰|星驰|恩来)|週(?!期(?![货貨末中间間])|刊)|星期)"
_HAN_YEAR_WORDS: Final = {
    "今年": 0, "本年度": 0, "本年": 0, "去年": 1, "昨年": 1, "上一年": 1, "前年": 2, "一昨年": 2, "大前年": 3,
}  # fmt: skip
_ERAS: Final = {"令和": 2018, "平成": 1988, "昭和": 1925, "民国": 1911, "民國": 1911}

_Reader = Callable[[re.Match[str], datetime], _Bounds]


def _han_digits(text: str) -> int:
    return int("".join(str(_DIGITS.get(digit, digit)) for digit in text))


def _same_day(match: re.Match[str], origin: datetime) -> _Bounds:
    year = origin.year - _number(match[1])
    if match[2] == "今天" or match[2] == "今日":
        return _day(year, origin.month, min(origin.day, 28) if origin.month == 2 else origin.day)
    about = _at(year, origin.month, min(origin.day, 28))
    return about - timedelta(days=15), about + timedelta(days=16)


def _but(before: str, reader: _Reader, *, also: str = r"(?!)", did: bool = False) -> _Reader:
    """Return the reader for where none of these patterns ends right before the form; `did`: a question after "did" is told so."""
    ends = re.compile(rf"(?:{before}|{also})\s*$")

    def read(match: re.Match[str], origin: datetime) -> _Bounds:
        ahead = match.string[max(0, match.start() - 80) : match.start()]
        if ends.search(ahead) and not (did and re.search(r"\b(?:did|was|were)\b", ahead)):
            raise ValueError("counts something else")
        return reader(match, origin)

    return read


_START: Final = r"(?<![\u4e00-\u9fff\u3040-\u30ff\w])"
_BOUNDS: Final = (
    r"\b(?:less|more|fewer|longer|earlier|later) than|\b(?:at least|at most|over|under|within|up to)"
)
_WHOSE: Final = r"\b(?:my|your|his|her|(?:employee|worker|student|tenant|patient|child|person)['’]s)"
_SHOWN: Final = r"(?:data|sales|logs?|invoices|transactions|news|results|usage|orders|payments|messages|e-?mails|records|history|activity|bills|statements|reports|earnings|revenue|spending|commits|changes|updates|releases|traffic|weather)\b"
_AMOUNT: Final = (
    r"\b(?:loans?|sums?|amounts?|totals?|budgets?|fees?|prices?|costs?|limits?|maximum|minimum|max|min|salary|salaries|wages?|income"
    r"|rent|deposits?|bonus|grants?|fines?|values?|balance|charges?|payments?|penalty|penalties|capacity|size|length|width|height|depth"
    r"|weight|distance|speed|rate|power|resolution|dose|count|number|average|mean|excess|score|quota|threshold|allowance|discount"
    r"|time-?out|population|temperature|altitude|elevation|pressure|mortgage|credit|debt|turnover|revenue|profit|worth|capital"
    r"|increase[sd]?|raised?|reduced?|cut|lower(?:ed)?|grows?|grew|rises?|rose|drops?|dropped|falls?|fell|exceed(?:s|ed)?|range[sd]?)"
)
_EVENT: Final = re.compile(
    r"(?:退休|离职|離職|辞职|辭職|入职|入職|出发|出發|[到期][期满滿]|届[满滿]|满期|考[试試]|手[术術]|出[国國境]|[结結]婚|婚[礼禮]|开庭|開庭|起[飞飛]"
    r"|[开開][学學会會工]|[毕畢][业業]|截止|会议|會議|活[动動]|比[赛賽]|演出|面[试試]|登[机機]|[发發]车|發車|入住|退房|预产期|預產期|分娩|生[产產]"
    r"|搬家|[旅出]行|旅游|旅遊|服[用药藥]|用[药藥]|[体體][检檢]|接[种種]|[检檢]查|[备備]孕|[怀懷]?孕|航班|[节節]日|生日|[预預][约約定]|[参參][会會]|[续續][约約签簽]"
    r"|出発|退職|入社|期限|試験|開始|終了|宿泊|予約|搭乗|開催|公演|実施|支払い?|納期|出産|[満满]了|卒業|引っ?越し?|締め?切り?|解約|契約|利用|乗車|面接"
    r"|入学|定年|受診|検査|チェックイン|イベント|セミナー|誕生日|発売)(?:[日时時]|予定日|当日)?(?:の|前の)?約?$"
    # Of what: Japanese has it before a の. And rules, wherever they begin to count.
    r"|の約?$"
    r"|(?:至少|最少|最[迟遲晚]|起[码碼]|提前|(?<![供反适適响響])[应應][该該当當]?|[须須]|必[须須]|不[晚迟遲][于於]|遅くとも|少なくとも|[满滿足]|不[到足])[在于於]?$"
)
_ORDERED: Final = re.compile(r"(?:需要?|要)[在于於]?$")
_DEADLINE: Final = re.compile(
    r"(?:[书書]面)?(?:提出|提交|申[请請]|通知|告知|取消|[预預][约約]|[办辦]理|[报報][备備名]|退[订訂票]|改[签簽])(?![^，。？?]{0,8}[了的过過])"
)


def _relative(reader: _Reader) -> _Reader:
    """Return the reader of "three days ago" in Chinese and Japanese, where the words around don't count from an event.

    退休一年前 and 出発の3日前 are a year before retiring and three days before leaving, whenever that is; 至少三天前申请 is a
    rule. What has happened, told by 了, is counted from today again.
    """

    def read(match: re.Match[str], origin: datetime) -> _Bounds:
        ahead, behind = match.string[max(0, match.start() - 12) : match.start()], match.string[match.end() :]
        event = _EVENT.search(ahead) and not re.match(r"[^，。？?]{0,12}了", behind)
        ordered = _ORDERED.search(ahead) and not behind.startswith("的")
        if event or ordered or _DEADLINE.match(behind):
            raise ValueError("counts from an event")
        return reader(match, origin)

    return read


def _told_as_past(reader: _Reader) -> _Reader:
    """Return the reader for questions in the past tense: "can I leave two days earlier?" names no day."""

    def read(match: re.Match[str], origin: datetime) -> _Bounds:
        if not re.search(
            r"\b(?:did|was|were|had|happened|went|came|said|told)\b", match.string[: match.start()]
        ):
            raise ValueError("not told as past")
        return reader(match, origin)

    return read


# The order is that of trial at one place of the query: the longest form first. A reader may raise ValueError (31 June).
_FORMS: Final[tuple[tuple[str, _Reader, bool], ...]] = (
    # 2020-04-02, 2020/4/2, 2020.04.02
    (rf"{_NOT_IN_NAME}{_YEAR}([-/.])(\d\d?)\2(\d\d?)(?![\w]|[-/.]\d)", lambda m, _: _day(int(m[1]), int(m[3]), int(m[4])), True),
    (rf"{_NOT_IN_NAME}{_YEAR}-(0[1-9]|1[0-2])(?![\w]|-\d)", lambda m, _: _months(int(m[1]), int(m[2])), True),
    # March 5, 2020; March 5th 2020; 5 March 2020; March 2020; March of 2020
    (rf"\b{_MONTH}\s*(\d\d?)(?:st|nd|rd|th)?,?\s+{_YEAR}\b", lambda m, _: _day(int(m[3]), _MONTHS[m[1]], int(m[2])), True),
    (rf"\b(\d\d?)(?:st|nd|rd|th)?\s+(?:of\s+)?{_MONTH},?\s+{_YEAR}\b", lambda m, _: _day(int(m[3]), _MONTHS[m[2]], int(m[1])), True),
    (rf"\b{_MONTH},?\s+(?:of\s+)?{_YEAR}(?![\w-]|\.\d|\s+people\b){_COUNTS}", lambda m, _: _months(int(m[2]), _MONTHS[m[1]]), True),
    # Not "in 2023 may employees …", "the 2019 march on …".
    (rf"{_NOT_IN_NAME}{_YEAR},?\s+(?!may\s+[a-z]|march\s+(?:on|to|in|for|of|by|against|through|from|was)\b){_MONTH}(?!\s+\d)", lambda m, _: _months(int(m[1]), _MONTHS[m[2]]), True),
    # Q3 2021, 2021 Q3, third quarter of 2021, first half of 2020
    (rf"\bq([1-4])[ -/]?\s*{_YEAR}\b", lambda m, _: _months(int(m[2]), 3 * int(m[1]) - 2, 3), True),
    (rf"{_NOT_IN_NAME}{_YEAR}[ -/]?\s*q([1-4])\b", lambda m, _: _months(int(m[1]), 3 * int(m[2]) - 2, 3), True),
    (rf"\b(first|second|third|fourth|last)\s+quarter\s+(?:of\s+)?{_YEAR}\b", lambda m, _: _months(int(m[2]), 3 * _WORDS[m[1]] - 2, 3), True),
    (rf"\b(first|second)\s+half\s+(?:of\s+)?{_YEAR}\b", lambda m, _: _months(int(m[2]), 6 * _WORDS[m[1]] - 5, 6), True),
    # 2020年4月2日, 2020年4月, 2020年第三季度, 2020年底, 二〇二〇年, 令和5年, 去年5月, 四年前的4月18日
    (rf"(?<!\d)((?:1[0-9]|20|21)\d\d|[一二][〇零一二三四五六七八九]{{3}})\s?年(?!代|前|间|以[上下内內]|之久|的?[历歷]史(?![事上数數价價成资資学學文])|の歴史)\s?{_REST}", _but(r"距今|[长長][达達]|[历歷][时時]", lambda m, _: _part(_han_digits(m[1]), m[2])), True),
    (rf"(令和|平成|昭和|民国|民國)({_HAN_NUMBER}|元)年{_REST}", lambda m, _: _part(_ERAS[m[1]] + (1 if m[2] == "元" else _number(m[2])), m[3]), True),
    # What is left over from last year, and what a year's figures are compared with, is asked about today.
    (r"[去昨上]年(?:度)?(?=(?:的|[没沒]|未|剩|[还還])[^，。？?]{0,6}(?:假|[积積]分|[额額]度|[余餘][额額]))", lambda m, o: _years(o.year - 1), False),
    (rf"({'|'.join(sorted(_HAN_YEAR_WORDS, key=len, reverse=True))})(?<!前年(?=度|同|比))(?<!昨年(?=比|同期比))(?<!上一年(?=[级級])){_REST}", lambda m, o: _part(o.year - _HAN_YEAR_WORDS[m[1]], m[2]), True),
    (rf"(?<![\d第]){_HAN}年前的?(今天|今日|这个时候|這個時候|这时候|同期)", _same_day, True),
    (rf"(?<![\d第]){_HAN}年{_AGO}{_REST}", _relative(lambda m, o: _part(o.year - _number(m[1]), m[2])), True),
    # 过去三年, 近五年, 最近三天, 三天以来; 三天前, 两周前, 3ヶ月前
    (rf"(?:过去|過去|近|最近|[这這](?!一[天日年月])|ここ){_HAN}(?:个|個|か|ヶ|カ|ケ)?(天|日|周|週間|週|星期|月|年(?![级級])|小时|小時|時間|季度)(?!前)", lambda m, o: _since(o, _HAN_UNITS[m[2]], _number(m[1])), True),
    # Not 每月15日前, by the 15th, nor what stands before the third day.
    (rf"(?<![\d月第]){_HAN}(?:个|個|か|ヶ|カ|ケ)?(天|日|周|週間|週|星期|月|小时|小時|時間)(?:之|以)?{_AGO}", _relative(lambda m, o: _unit(o, _HAN_UNITS[m[2]], _number(m[1]))), True),
    (r"上个?(?:周|週|星期|礼拜)([一二三四五六日末]|天(?![气氣]))", lambda m, o: _weekday(o, _HAN_WEEKDAYS[m[1]], 1, 2 if m[1] == "末" else 1), True),
    (r"(?:本|这|這|这个)(?:周|週|星期)([一二三四五六日末]|天(?![气氣]))", lambda m, o: _weekday(o, _HAN_WEEKDAYS[m[1]], 0, 2 if m[1] == "末" else 1), True),
    (rf"(?:上|上一|上个|上個|先|前|{_START}前一){_WEEK}", lambda _, o: _unit(o, "w", 1), True),
    (rf"(?:本|这|這|这个|今){_WEEK}", lambda _, o: _unit(o, "w", 0), True),
    (r"(?:上个|上個|上一个|上|先)月(?:份)?", lambda _, o: _unit(o, "m", 1), True),
    (r"(?:本|这个|這個|当|今)月(?:份)?(?!\d)", lambda _, o: _unit(o, "m", 0), True),
    (r"(?:上|上个|上個|上一)季度", lambda _, o: _unit(o, "q", 1), True),
    (r"大前天", lambda _, o: _unit(o, "d", 3), True),
    (r"前天|一昨日|おととい", lambda _, o: _unit(o, "d", 2), True),
    (rf"昨天|昨日|昨晚|{_START}前一[天日]|きのう", lambda _, o: _unit(o, "d", 1), True),
    (r"今天|今日|今晚|きょう", lambda _, o: _unit(o, "d", 0), True),
    # 4月18日, 8月底 without a year: the newest such time; a month in Han numerals needs more than 月 (五月天, 十月革命)
    # By such a day, "12月3日前", as often as it comes.
    (rf"(?<![\d年]){_HAN}月(?:份)?{_HAN}[日号號](?=(?:之|以)?前|まで)", lambda m, o: _last_time(o, _number(m[1]), _number(m[2])), False),
    (rf"(?<![\d年]){_HAN}月(?:份)?{_HAN}[日号號]", lambda m, o: _last_time(o, _number(m[1]), _number(m[2])), True),
    (r"(?<![\d年.孕满滿达達足])(1[0-2]|[1-9])月(?:份)?(?![\d大龄齢齡]|[内內](?!蒙))", lambda m, o: _last_time(o, int(m[1])), True),
    (rf"(?<![\d年个個]){_HAN}月(?:份|初|底|末|上旬|中旬|下旬)", lambda m, o: _last_time(o, _number(m[1])), True),
    # the 1990s, the 90s, 20世纪90年代, 1990年代
    (rf"(?<![\w-])(1[5-9]\d0|20\d0)(?:'?s\b{_TIMING}|年代)", _but(r"\b(?:time-?out|ttl|delay|interval|wait|lease|keep-?alive|after|every|max-age|expir\w+|cache[sd]?|sleeps?)\W*(?:of|is|to|for|in|set to)?", lambda m, _: _years(int(m[1]), 10)), True),
    (r"(?:20世纪|20世紀|上世纪|上世紀)([2-9])0年代", lambda m, _: _years(1900 + 10 * int(m[1]), 10), True),
    (rf"\bthe '?([2-9])0s\b{_TIMING}", lambda m, _: _years(1900 + 10 * int(m[1]), 10), True),
    # last week, past 3 days, 2 years ago, last Tuesday
    # "More than two years ago" bounds, and what befell the asker two days ago is no date of documents.
    (rf"\b{_COUNT}\s+(day|week|month|year|decade|hour)s?\s+ago\b", _but(rf"{_BOUNDS}|\b(?:i|i've)(?!\s+did)(?:\s+(?!did\b)[\w'-]+){{1,6}}|\bif\b[^.?!;]*", lambda m, o: _unit(o, _UNITS[m[2]], _number(m[1])), did=True), True),
    (rf"\b{_COUNT}\s+(day|week|month|year|decade|hour)s?\s+ago\b", lambda m, o: _unit(o, _UNITS[m[2]], _number(m[1])), False),
    # Nothing behind it says before what, and the question is about what was: "what happened two days earlier?"
    (rf"\b{_COUNT}\s+(day|week|month|year|decade|hour)s?\s+(?:earlier|before)(?=\s*(?:$|[?!.,;]))", _told_as_past(lambda m, o: _unit(o, _UNITS[m[2]], _number(m[1]))), True),
    (rf"\b(?:in\s+)?(?:the\s+)?(?:last|past|previous|recent)\s+{_COUNT}\s+(day|week|month|year|decade|hour|quarter)s?\b(?!\s+(?:before|prior)\b|\s+of\b(?!\s+{_SHOWN}))", _but(_WHOSE, lambda m, o: _since(o, _UNITS[m[2]], _number(m[1]))), True),
    (r"\bprevious\s+(week|month|year|quarter)\b", _but(r"\b(?:the|a|any|each|every)", lambda m, o: _unit(o, _UNITS[m[1]], 1), also=_WHOSE), True),
    (r"\b(?:last|past)\s+(week|month|year|quarter)(?=['’]s\b)", lambda m, o: _unit(o, _UNITS[m[1]], 1), True),
    (rf"\b(?:last|past)\s+(week|month|year|quarter)\b(?!\s+(?:before|prior)\b|\s+of\b(?!\s+{_SHOWN}))", _but(r"\b(?:each|every|(?:carry|carried|roll|rolled|unused|untaken|remaining|left ?over|(?:days|leave|holiday) left)\b[^.?!;]{0,40})", lambda m, o: _unit(o, _UNITS[m[1]], 1), also=_WHOSE), True),
    (r"\bthis\s+(week|month|year|quarter)\b", lambda m, o: _unit(o, _UNITS[m[1]], 0), True),
    # Not "paid on the last Friday of the month".
    (rf"\blast\s+{_WEEKDAY}\b(?!\s+(?:of|in|before|each|every)\b)", lambda m, o: _weekday_before(o, _WEEKDAYS[m[1]]), True),
    (r"\bday before yesterday\b", lambda _, o: _unit(o, "d", 2), True),
    (r"\byesterday\b", lambda _, o: _unit(o, "d", 1), True),
    (rf"\b(?:last|this past)\s+{_MONTH}", lambda m, o: _last_time(o, _MONTHS[m[1]]), True),
    # on March 5; in March: the newest such time
    (rf"\bon\s+{_MONTH}\s*(\d\d?)(?:st|nd|rd|th)?\b(?![\w.])", lambda m, o: _last_time(o, _MONTHS[m[1]], int(m[2])), True),
    (rf"\b(?:in|during)\s+{_MONTH}(?=\s*(?:$|[?.!,;]))", lambda m, o: _last_time(o, _MONTHS[m[1]]), True),
    # since 2019, after 2019, before 1990
    (rf"\bsince\s+{_YEAR}(?![\w-]|\.\d){_COUNTS}", lambda m, o: (_at(int(m[1])), max(_at(int(m[1]) + 1), _midnight(o) + timedelta(days=1))), True),
    (rf"\bafter\s+{_YEAR}(?![\w-]|\.\d){_COUNTS}", lambda m, o: (_at(int(m[1]) + 1), max(_at(int(m[1]) + 2), _midnight(o) + timedelta(days=1))), True),
    (rf"\b(?:before|until)\s+{_YEAR}(?![\w-]|\.\d){_COUNTS}", lambda m, _: (_at(int(m[1]) - 10), _at(int(m[1]))), True),
    # What may be an amount as well: "refunds up to 2000", "a fee of 1500", "from 1500 pieces", "1920 by 1080".
    (rf"\bup to\s+{_YEAR}(?![\w-]|\.\d){_COUNTS}", lambda m, _: (_at(int(m[1]) - 10), _at(int(m[1]))), False),
    (rf"\b(?:of|from|by|between)[ -](1[0-4]\d\d)(?![\w-]|\.\d){_COUNTS}", lambda m, _: _years(int(m[1])), False),
    (rf"\b(?:in|of|from|by|between)[ -]((?:1[5-9]|2[01])(?:00|50))(?![\w-]|\.\d){_COUNTS}(?=\s+(?!(?:was|is|has|does|as|its|his|this|us|across|versus)\b)[a-z]{{2,}}(?<!s)s\b)", lambda m, _: _years(int(m[1])), False),
    (rf"{_AMOUNT}\s+(?:of|from|by)\s((?:1[5-9]|2[01])(?:00|50))(?![\w-]|\.\d){_COUNTS}", lambda m, _: _years(int(m[1])), False),
    (rf"\b(?:in|during|of|from|by|early|late|mid|year|between)[ -]{_YEAR}(?![\w-]|\.\d){_COUNTS}", lambda m, _: _years(int(m[1])), True),
    # A bare number that may be a year, and no part of a name that counts.
    (rf"{_NOT_IN_NAME}(?<!rfc )(?<!iso )(?<!iec )(?<!ieee )(?<!pep )(?<!bcp )(?<!std )(?<!port )(?<!error )(?<!code )(?<!page )(?<!section )(?<!no )(?<!no\. )(?<!number )(?<!windows )(?<!office )(?<!model )((?:19|20)\d\d)(?![\w]|[-./,:]\d|\s?(?:x|×|km|m|kg|mhz|ghz|w|v|hp|people|words|items|files|users|px|bytes|ad)\b){_COUNTS}", lambda m, _: _years(int(m[1])), False),
)  # fmt: skip
_COMPILED: Final = tuple((re.compile(form), reader, sure) for form, reader, sure in _FORMS)
_MAYBE: Final = re.compile(
    r"\d|年|月|周|週|天|日|星期|世纪|\b(?:ago|earlier|before|last|past|previous|this|yesterday|day|in|during|on|recent)\b|おととい|きのう|きょう|晚|季度"
)


def _weekday(origin: datetime, weekday: int, weeks_back: int, days: int) -> _Bounds:
    first = _unit(origin, "w", weeks_back)[0] + timedelta(days=weekday)
    return first, first + timedelta(days=days)


def _weekday_before(origin: datetime, weekday: int) -> _Bounds:
    today = _midnight(origin)
    first = today - timedelta(days=(today.weekday() - weekday - 1) % 7 + 1)
    return first, first + timedelta(days=1)


def _spans(text: str, origin: datetime) -> list[tuple[int, int, Span]]:
    """Return the times named, with where they stand, in the order of the query; forms don't overlap."""
    if not _MAYBE.search(text):
        return []
    found: list[tuple[int, int, Span]] = []
    taken: list[tuple[int, int]] = []
    for form, reader, sure in _COMPILED:
        for match in form.finditer(text):
            begin, end = match.span()
            if any(begin < late and early < end for early, late in taken):
                continue
            try:
                first, after = reader(match, origin)
                span = Span(to_ms(first), to_ms(after), match[0].strip(), sure)
            except (ValueError, KeyError, OverflowError):  # no such day or number
                continue
            taken.append((begin, end))
            found.append((begin, end, span))
    return sorted(found, key=lambda item: item[0])


_BETWEEN: Final = re.compile(r"\s*(?:-|–|—|~|〜|to|until|till|through|and|到|至|和|から|与|與)\s*")


def _joined(text: str, found: list[tuple[int, int, Span]]) -> Iterator[Span]:
    """Yield the spans, those joined to a range ("from 2019 to 2021", "2019年到2021年") as one."""
    position = 0
    while position < len(found):
        begin, end, span = found[position]
        position += 1
        while position < len(found) and span.sure:
            other_begin, other_end, other = found[position]
            gap = text[end:other_begin]
            if not _BETWEEN.fullmatch(gap) or other.start_ms < span.start_ms:
                break
            if (
                gap.strip() in ("and", "和", "与", "與")
                and not text[:begin].rstrip().endswith("between")
                and not span.text.startswith("between")
            ):
                break
            span = Span(span.start_ms, max(span.end_ms, other.end_ms), text[begin:other_end].strip())
            end = other_end
            position += 1
        yield span
