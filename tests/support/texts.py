# ruff: noqa: RUF001 - letters of other scripts look like Latin ones
"""Three hundred texts: twenty scripts, plain and with characters that break naive streaming.

Each script has three sentences; each sentence comes as it is, with emoji, with joined emoji
(zero-width joiners, skin tones, flags), with combining and invisible marks, and amid code, numbers
and white space.
"""

SENTENCES = {
    "Latin": [
        "All human beings are born free and equal in dignity and rights.",
        "Thirty-two mice can't fit in 3.14 boxes, can they?",
        "Größe und Maß: die Straße führt über eine schöne Brücke.",
    ],
    "Vietnamese": [
        "Tất cả mọi người sinh ra đều được tự do và bình đẳng.",
        "Hôm nay trời đẹp, chúng tôi uống cà phê ở Huế.",
        "Tiếng Việt có nhiều dấu: ngã, hỏi, nặng, sắc, huyền.",
    ],
    "Greek": [
        "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι.",
        "Ο ήλιος λάμπει πάνω από τη θάλασσα.",
        "Πόσο κοστίζει αυτό το βιβλίο;",
    ],
    "Cyrillic": [
        "Все люди рождаются свободными и равными в своём достоинстве.",
        "Съешь ещё этих мягких французских булок, да выпей чаю.",
        "Київ – столиця України, їжак біжить.",
    ],
    "Arabic": [
        "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.",
        "السَّلَامُ عَلَيْكُمْ وَرَحْمَةُ اللهِ",
        "كم الساعة الآن؟ ١٢:٣٠",
    ],
    "Hebrew": [
        "כל בני האדם נולדו בני חורין ושווים בערכם.",
        "בְּרֵאשִׁית בָּרָא אֱלֹהִים",
        "מה שלומך היום?",
    ],
    "Devanagari": [
        "सभी मनुष्य जन्म से स्वतंत्र और समान हैं।",
        "क्षत्रिय और ज्ञान, श्री कृष्ण।",
        "आज मौसम बहुत अच्छा है।",
    ],
    "Bengali": [
        "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা নিয়ে জন্মগ্রহণ করে।",
        "আমি বাংলায় গান গাই।",
        "কলকাতা একটি বড় শহর।",
    ],
    "Tamil": [
        "மனிதர் யாவரும் சுதந்திரமாகவே பிறக்கின்றனர்.",
        "தமிழ் மொழி மிகவும் பழமையானது.",
        "வணக்கம், எப்படி இருக்கிறீர்கள்?",
    ],
    "Telugu": [
        "మానవులెల్లరును జన్మతః స్వతంత్రులు.",
        "తెలుగు భాష చాలా తియ్యనిది.",
        "హైదరాబాద్ పెద్ద నగరం.",
    ],
    "Thai": [
        "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน",
        "วันนี้อากาศดีมากเลยนะครับ",
        "กรุงเทพฯ เป็นเมืองหลวงของไทย",
    ],
    "Khmer": [
        "មនុស្សទាំងអស់កើតមកមានសេរីភាព",
        "ខ្ញុំស្រឡាញ់ភាសាខ្មែរ",
        "ភ្នំពេញជារាជធានី",
    ],
    "Myanmar": [
        "လူတိုင်းသည် တူညီလွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့် မွေးဖွားလာသည်။",
        "မင်္ဂလာပါ",
        "ရန်ကုန်မြို့သည် ကြီးမားသည်။",
    ],
    "Georgian": [
        "ყველა ადამიანი იბადება თავისუფალი და თანასწორი.",
        "თბილისი საქართველოს დედაქალაქია.",
        "გამარჯობა, როგორ ხარ?",
    ],
    "Armenian": [
        "Բոլոր մարդիկ ծնվում են ազատ ու հավասար։",
        "Երևանը Հայաստանի մայրաքաղաքն է։",
        "Բարև, ինչպե՞ս ես",
    ],
    "Ethiopic": [
        "የሰው ልጅ ሁሉ ሲወለድ ነጻ ነው።",
        "አዲስ አበባ ትልቅ ከተማ ናት።",
        "ሰላም፣ እንዴት ነህ?",
    ],
    "Han": [
        "人人生而自由，在尊严和权利上一律平等。",
        "今天天气很好，我们去公园散步吧。",
        "𠮷野家在東京，𪚥龘𰻞很少見。",
    ],
    "Japanese": [
        "すべての人間は、生まれながらにして自由であり。",
        "東京タワーへ行きました。ｶﾀｶﾅも。",
        "ありがとうございます、先生！",
    ],
    "Hangul": [
        "모든 인간은 태어날 때부터 자유로우며 평등하다.",
        "오늘 날씨가 참 좋네요. ㅋㅋㅋ",
        "대한민국의 수도는 서울이다.",
    ],
    "Tibetan": [
        "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་རང་དབང་།",
        "བོད་ཀྱི་སྐད་ཡིག",
        "བཀྲ་ཤིས་བདེ་ལེགས།",
    ],
}

_EMOJI = ["😀", "🎉🎊", "🚀 ", "❤️", "☕", "🐘", "💯", "🌍"]
_JOINED = ["👩‍👩‍👧‍👦", "👨🏽‍🚀", "🏳️‍🌈", "🇩🇪🇯🇵", "🧑🏿‍💻", "👍🏻", "1️⃣", "🏴󠁧󠁢󠁳󠁣󠁴󠁿"]
# Combining marks, joiners, direction marks, a soft hyphen, a byte order mark, a null.
_MARKS = [
    "e\u0301",
    "Z\u0351\u036b\u0343a\u0328\u0301l\u0335",
    "\u200b",
    "\u200d",
    "\u202e\u202c",
    "\u00ad",
    "\ufeff",
    "\x00",
]
_FRAMES = [
    'print("{}")  # 12345\n',
    "\n\n  - {}\r\n\t* 3.14159",
    "   {}   \n\n\n",
    "<b>{}</b>&nbsp;\\n",
    '{{"text": "{}", "n": [1, 22, 333]}}',
    "▁{}▁▁",
    "$x^2$ — “{}” … ½ ² ٣",
    "Ġ{}Ċ",
]


def _variants(sentence: str, number: int) -> list[str]:
    def pick(choices: list[str], step: int) -> str:
        return choices[(number + step) % len(choices)]

    middle = len(sentence) // 2
    words = sentence.split(" ")
    return [
        sentence,
        pick(_EMOJI, 0) + sentence[:middle] + pick(_EMOJI, 1) + sentence[middle:] + pick(_EMOJI, 3),
        f" {pick(_JOINED, 1)} ".join(words) + pick(_JOINED, 0),
        pick(_MARKS, 1) + sentence[:middle] + pick(_MARKS, 0) + sentence[middle:] + pick(_MARKS, 2),
        pick(_FRAMES, 0).format(sentence) + pick(_JOINED, 2),
    ]


TEXTS: list[str] = [
    text
    for number, sentence in enumerate(s for group in SENTENCES.values() for s in group)
    for text in _variants(sentence, number)
]
