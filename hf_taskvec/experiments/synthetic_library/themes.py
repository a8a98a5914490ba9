"""The words of the synthetic library: what its books are about, and how they speak.

A *theme* is a world to write about (the sea, a garden, a circus, ...): its trades, places, things, deeds and sights. A
*voice* is a manner of writing (a tale, a diary, letters, a guide, a chronicle): sentence patterns for the beats of a
scene. Slots in braces are filled by `book_writer`: the scene's people `{a}` and `{b}` with their pronouns, its
`{place}` and its `{thing}` stay the same throughout a scene; all others are drawn anew each time.

No pattern has a long stretch without a slot: the harness leaves out passages of which twelve words in a row stand
elsewhere, and what is left should be most of a book.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """The words of one world."""

    role: tuple[str, ...]
    spot: tuple[str, ...]
    thing: tuple[str, ...]
    deed: tuple[str, ...]
    sight: tuple[str, ...]
    lore: tuple[str, ...]


def _theme(role: str, spot: str, thing: str, deed: str, sight: str, lore: str) -> Theme:
    return Theme(*(tuple(each.strip() for each in part.split("|")) for part in (role, spot, thing, deed, sight, lore)))


THEMES = {
    "sea": _theme(
        "harbour master|ferryman|net maker|lighthouse keeper|pearl diver|ship's cook|sail maker|old pilot",
        "pier|lighthouse|cove|shipyard|fish market|sandbank|tavern|sea wall",
        "brass compass|fishing net|coral comb|signal lamp|barrel of herring|torn sail|silver anchor|oyster shell|"
        "rope ladder|chart of the reefs|bottle of rum|wooden oar",
        "hauled in the nets|rowed against the tide|counted the sails|tarred the old boat|tied a sailor's knot|"
        "dived beneath the waves|lit the signal fire|scraped the barnacles away|bailed out the water|"
        "watched for the ferry",
        "gulls were crying over the masts|the waves broke upon the rocks|a whale had been seen at dawn|"
        "salt lay white on every rope|the tide was running out|crabs hid under the stones|"
        "a red boat was coming home|the fog rolled in from the bay",
        "the tide waits for no one|a wet rope never lies|still water hides the deepest rocks|"
        "the wind is a bad servant|every wave comes home|a good knot is half the voyage",
    ),
    "garden": _theme(
        "head gardener|bee keeper|rose grower|seed merchant|apple picker|mole catcher|herb woman|hedge cutter",
        "orchard|greenhouse|rose walk|potting shed|lily pond|walnut tree|herb garden|south wall",
        "watering can|basket of plums|packet of seeds|straw hat|clay pot|jar of honey|pruning knife|stone sundial|"
        "wicker chair|rusty spade|bunch of lavender|marble statue",
        "pruned the roses|dug up the carrots|watered the seedlings|raked the gravel path|gathered the windfalls|"
        "tied up the sweet peas|chased the rabbits away|planted a row of beans|swept the dead leaves|"
        "picked the caterpillars off",
        "bees hummed among the foxgloves|the pears were almost ripe|a thrush sang in the hedge|"
        "snails had eaten the lettuce|the first snowdrops were out|moss grew between the bricks|"
        "the fountain had run dry|butterflies sat upon the thistles",
        "a weed is a flower with enemies|slow roots make tall trees|rain pays every debt|"
        "the spade knows more than the book|nothing blooms in a hurry|frost reads no calendar",
    ),
    "clock": _theme(
        "clockmaker|bell ringer|watch mender|tower guard|brass founder|pocket thief|mayor's clerk|night porter",
        "bell tower|workshop|town square|pawn shop|iron bridge|council hall|narrow stair|attic room",
        "pocket watch|brass wheel|coiled spring|glass dial|copper key|music box|pendulum|tiny hammer|oil lamp|"
        "magnifying glass|silver bell|wooden cuckoo",
        "wound the great clock|oiled the gears|counted the strokes|filed a new cog|climbed the winding stair|"
        "polished the dial|set the hands back|listened to the ticking|bent the mainspring straight|"
        "hung the weights again",
        "the bells were out of tune|pigeons slept upon the hour hand|every shop had shut its doors|"
        "a crowd stood below the dial|the street lamps burned yellow|the hands had stopped at noon|"
        "rust had eaten the chain|smoke rose from the chimneys",
        "a late clock is an honest liar|time is kept by small teeth|haste breaks the finest wheel|"
        "no bell rings twice the same|a minute saved is soon mislaid|patience is the best oil",
    ),
    "mountain": _theme(
        "goatherd|mountain guide|innkeeper|snow warden|charcoal burner|mule driver|cheese maker|hermit",
        "high pass|stone hut|glacier|pine forest|rope bridge|monastery|upper meadow|hot spring",
        "climbing rope|wool blanket|wheel of cheese|ice axe|cow bell|tin lantern|wooden sledge|pair of boots|"
        "carved staff|bundle of firewood|sheepskin coat|crystal stone",
        "crossed the snow field|milked the goats|cut steps in the ice|carried the firewood up|"
        "shouted to hear the echo|led the mules down|melted snow for tea|mended the fence of the fold|"
        "slept beneath an overhang|followed the eagle's cry",
        "clouds lay below the ridge|an avalanche had closed the road|the peaks turned pink at sunset|"
        "marmots whistled from the rocks|the stream was frozen hard|wolves had left their tracks|"
        "snow fell without a sound|larches glowed like candles",
        "the summit is only half the climb|snow remembers every foot|thin air makes honest men|"
        "a mountain is never asleep|the short path is the long one|go up with bread and down with thanks",
    ),
    "circus": _theme(
        "ringmaster|sword swallower|tightrope walker|lion tamer|fortune teller|clown|fire eater|drummer",
        "big tent|lion cage|costume wagon|ticket booth|sawdust ring|train yard|mirror maze|elephant stable",
        "red balloon|velvet cape|juggling club|trumpet|painted mask|bag of sawdust|golden hoop|crystal ball|"
        "feathered hat|stack of tickets|silk ribbon|tin whistle",
        "walked the high wire|fed the old lion|painted a crooked smile|juggled seven plates|drummed for the parade|"
        "swept up the confetti|brushed the white pony|hung from the trapeze|practised a double somersault|"
        "sold the last ticket",
        "the crowd was stamping its feet|sawdust flew up from the ring|the elephants were trumpeting|"
        "coloured lamps swung in the wind|children peeped beneath the canvas|the band had lost its tuba|"
        "popcorn crackled in the pans|a monkey had stolen the keys",
        "never bow before the trick is done|a clown must weep in private|the rope feels every doubt|"
        "applause is a kind of weather|lions like an early supper|the show begins when you fall",
    ),
    "kitchen": _theme(
        "pastry cook|butcher's boy|spice trader|head waiter|dish washer|baker|wine steward|cake decorator",
        "bakery|wine cellar|pantry|spice market|dining hall|brick oven|ice house|scullery",
        "copper pan|loaf of rye|sack of flour|pepper mill|rolling pin|pot of jam|silver spoon|plum pudding|"
        "wedge of butter|carving knife|recipe book|string of onions",
        "kneaded the dough|stirred the thick soup|whipped the cream|burned the almond tart|chopped a heap of leeks|"
        "tasted the gravy twice|peeled the chestnuts|glazed the roasted duck|scrubbed the biggest pot|"
        "rolled out the pastry",
        "steam covered the windows|bread was rising near the stove|cinnamon scented the whole house|"
        "eggs boiled over the fire|the butter had turned sour|mice had found the cheese|forty guests were waiting|"
        "sugar crunched under their shoes",
        "hunger is the finest sauce|a watched pot sulks|salt forgives nobody|the cake knows when you worry|"
        "too many spoons spoil the stew|a sharp knife is a safe one",
    ),
    "railway": _theme(
        "station master|engine driver|ticket inspector|signalman|coal stoker|mail sorter|track walker|dining steward",
        "platform|signal box|engine shed|long tunnel|waiting room|goods yard|viaduct|turntable",
        "leather suitcase|brass whistle|green flag|mail sack|timetable|shovel of coal|lost umbrella|steam gauge|"
        "paper ticket|travelling rug|hat box|iron wrench",
        "shovelled the coal|waved the green flag|punched the tickets|switched the points|missed the night express|"
        "greased the axles|unloaded the parcels|stamped the letters|hurried along the carriages|"
        "slept on a luggage cart",
        "the express was an hour late|sparks flew from the wheels|the rails were singing|"
        "passengers crowded round the stove|a fallen tree had blocked the line|the whistle blew three times|"
        "soot had darkened the glass|lamps winked down the valley",
        "every train is somebody's last|the points decide, not the engine|a ticket is a small promise|"
        "steam has no memory|the slow line sees more|trust the signal before your eyes",
    ),
    "stars": _theme(
        "astronomer|lens grinder|comet hunter|map maker|night watchman|calendar priest|glass blower|young pupil",
        "observatory|dome|library of maps|hill of stones|lens workshop|moon terrace|spiral ramp|cold gallery",
        "telescope|star chart|glass prism|lunar calendar|ink bottle|meteor stone|brass globe|candle stub|"
        "notebook of figures|silver mirror|quill pen|hourglass",
        "counted the falling stars|ground a new lens|measured the moon's shadow|named a faint comet|"
        "copied the old tables|turned the heavy dome|waited for the eclipse|sketched the northern sky|"
        "cleaned the great mirror|marked the planets' paths",
        "the milky way shone overhead|a comet hung above the hill|clouds had hidden the moon|"
        "Saturn stood beside the tower|owls flew round the dome|frost covered the instruments|"
        "the eclipse was about to begin|meteors fell in the east",
        "the dark is only light delayed|a chart is a polite guess|small lenses see great things|"
        "the sky keeps no secrets from the patient|even the sun has spots|doubt is the first telescope",
    ),
}  # fmt: skip

# What every book may draw from.
COMMON = {
    "time": [
        "at dawn", "before breakfast", "in the evening", "after supper", "at midnight", "in the afternoon",
        "a little later", "on the third day", "as the sun went down", "early next day",
    ],
    "weather": ["rain", "wind", "sunshine", "mist", "frost", "thunder", "drizzle", "heat"],
    "manner": [
        "slowly", "in silence", "with great care", "in a hurry", "without a word", "cheerfully", "with a sigh",
        "as quietly as possible", "twice over", "with both hands",
    ],
    "mood": [
        "tired", "happy", "angry", "afraid", "proud", "curious", "lonely", "calm", "ashamed", "hungry", "puzzled",
        "hopeful",
    ],
    "quality": [
        "old", "small", "strange", "heavy", "beautiful", "dusty", "famous", "forgotten", "precious", "broken",
        "plain", "curious",
    ],
    "hour": [
        "at dawn", "before breakfast", "in the evening", "after supper", "at midnight", "in the afternoon", "at noon",
        "on a holiday",
    ],
    "state": ["quiet", "crowded", "dark", "cold", "lively", "empty", "bright", "untidy", "solemn"],
    "number": ["two", "three", "four", "five", "six", "seven", "nine", "ten", "twelve", "twenty"],
    "season": ["spring", "summer", "autumn", "winter"],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
    "reason": [
        "the harvest was over", "a promise is a promise", "there was no money left", "the others had gone home",
        "it was the custom", "the night was so long", "no one had asked", "the danger was over",
    ],
}  # fmt: skip

# The beats of a scene in each voice; a scene takes one to three sentences from each beat, in this order.
VOICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "tale": (
        (
            "{time} {a} came to {place}, where {sight}.",
            "There was {weather} over {place} when {a} and {b} met the {role}.",
            "{a} had never seen {place} so {state}, for {sight}.",
            "Nobody at {place} knew {a}, but everyone knew {b}.",
            "When {a} reached {place}, {b} was already there and {deed}.",
        ),
        (
            "{a.He} was looking for the {thing}, which {b} had hidden {manner}.",
            "The {role} showed {a.him} the {thing}, {quality} and {quality2}.",
            "{a} {deed}, while {b} {deed2}.",
            "On the ground lay the {thing}, and beside it a {quality} {thing2}.",
            "{b} wanted the {thing} for {b.himself} and said so {manner}.",
            "{a} felt {mood}, and {a.he} {deed} {manner}.",
        ),
        (
            '"{lore}," said {b} {manner}.',
            '"Have you brought the {thing}?" asked {a}.',
            '"I would give {number} coins for that {thing}," said the {role}.',
            '"Look, {sight}," whispered {b} to {a}.',
            '"{b}, you are {mood} today," said {a}, and {deed}.',
            '"We must go to {place2} {time}," said {b}.',
        ),
        (
            "So {a} gave the {thing} to the {role}, and {b} laughed.",
            "{b} took the {thing} and ran to {place2} {manner}.",
            "At once {sight}, and both of them were {mood}.",
            "Then {a} {deed} for {number} hours, though {reason}.",
            "The {role} {deed}, and {a} fell asleep beside the {thing}.",
        ),
        (
            "That was how {a} lost the {thing} at {place}.",
            "{time} {a} and {b} went home {manner}, {mood} but friends.",
            "From then on {b} always kept the {thing} near {place2}.",
            "And {a} never told the {role} that {sight}.",
        ),
    ),
    "diary": (
        (
            "{day}. More {weather}, and {sight}.",
            "{day}. Woke {time} at {place}, feeling {mood}.",
            "{day}. I am {mood} tonight; {a} came to see me at {place}.",
            "{day}. Nothing but {weather} until I met {a} near {place}.",
        ),
        (
            "I {deed} until my fingers hurt.",
            "My {thing} is gone, and I suspect {a}.",
            "{a} lent me {a.his} {thing}, which is {quality} and smells of {weather2}.",
            "Went to {place} with {b}; we {deed} {manner}.",
            "Paid the {role} {number} coins for a {thing}.",
            "I have hidden the {thing} at {place2}, where {sight}.",
        ),
        (
            "{b} tells me that {lore}, but I doubt it.",
            "I dreamed that {b} {deed} while {sight}.",
            "Why is {a} so {mood}? I think it is because {reason}.",
            "The {role} swears that {b} {deed} {time}.",
            "I must remember to ask {b} about the {thing}.",
            "Had a quarrel with {a} over the {quality} {thing2}.",
        ),
        (
            "The {role} says I look {mood}, and I am.",
            "We shared {number} apples and a {quality} {thing2}.",
            "Wrote {number} pages about {place2} and tore them up {manner}.",
            "I {deed}; what else could I do, since {reason}?",
        ),
        (
            "To bed {manner}, thinking of {b} and the {thing}.",
            "Tomorrow {a} and I shall go to {place2}.",
            "I shall not speak to the {role} again.",
            "So ends another {mood} day in {season}.",
            "If {sight} once more, I shall leave {place}.",
        ),
    ),
    "letter": (
        (
            "Dear {b}, I write to you from {place}, where {sight}.",
            "My dear {b}, your letter about the {thing} reached me {time}.",
            "Dearest {b}, you will be {mood} to hear the news from {place}.",
            "Dear {b}, forgive my long silence; I have been {mood} since {season}.",
        ),
        (
            "You ask how {a} is: {a.he} has {deed} and is {mood}.",
            "Please send me the {quality} {thing} that you keep at {place2}.",
            "Our {role} has at last {deed}, which made {a} quite {mood}.",
            "Only think, {a} has sold {a.his} {thing} to a {role2} for {number} coins!",
            "I enclose a drawing of the {thing} and of {place}.",
            "Yesterday the {role} brought {a} a {quality} {thing2} from {place2}.",
            "We were all {mood}, and {a} {deed} {manner}.",
        ),
        (
            "You always used to say that {lore}.",
            "Do you remember the {season} when we {deed} together?",
            "If you meet {a}, tell {a.him} that {sight}.",
            "People here are {mood}, perhaps because {reason}.",
            "I have {deed} {number} times, and {a} only {deed2} once.",
            "Nobody has seen {a} since {day}, when {sight}.",
        ),
        (
            "The {thing} arrived {manner}, wrapped in paper, with your note.",
            "Pray do not show this letter to the {role} at {place2}.",
            "There is so much {weather} here that even {a} stays at home.",
            "I hope that you have not yet {deed} without me.",
            "For the {thing} I can offer {number} coins and a {quality} {thing2}.",
            "My {role} {deed}, and so we missed the {season} fair.",
        ),
        (
            "Write soon, and be {mood} for my sake.",
            "Give my love to the {role}, and keep the {thing} safe.",
            "Yours in haste, for {a} is waiting at {place2}.",
            "With {number} kisses, and in the hope of better {weather}.",
        ),
    ),
    "guide": (
        (
            "The traveller who comes to {place} in {season} will find that {sight}.",
            "{place} is best visited {hour}, when there is little {weather}.",
            "To reach {place}, ask any {role} for the {quality} road.",
            "Few visitors know {place}, which belongs to {a}.",
            "Of all the sights near {place2}, {place} is the most {quality}.",
            "Whenever {b} has {deed}, go straight to {place} and ask for {a}.",
        ),
        (
            "Here one may buy a {thing} for {number} coins from {a}.",
            "Notice the {quality} {thing} above the door: it was made by {b}.",
            "Do not touch the {thing2} unless the {role} invites you {manner}.",
            "It was here that {a} once {deed} in front of {number} strangers.",
            "On {day} the {role} will show you where {b} {deed}.",
            "The {quality} {thing2} in the corner was once lost by {b} in {weather}.",
            "A {role} named {a} {deed} here every {season}.",
        ),
        (
            "The people of this place believe that {lore}.",
            "A {mood} visitor should rest and look how {sight}.",
            "Beware of {b}, who sells every {thing} as if it were {quality}.",
            "Guests are expected to eat {manner} and to praise the {role}.",
            "Whoever is {mood} may knock at the house of {a}.",
            "Do not be {mood} if {b} {deed} {manner}: it is a greeting.",
            "There is a saying of {a} that {lore}.",
        ),
        (
            "From here a walk of {number} hours leads to {place2}.",
            "Take a {thing} with you, since {weather} is common in {season}.",
            "Rooms are cheap, and {a} keeps the {quality} beds {manner}.",
            "It is polite to leave a {thing2} for {b} on the table.",
            "For {number} coins the {role} carries your {thing} to {place2}.",
        ),
        (
            "All in all, {place} deserves {number} days of your time.",
            "Return {hour}, before {b} locks the gate.",
            "No one should leave without a {quality} {thing}.",
            "In {season}, however, {a} is {mood}, and one had better stay away.",
        ),
    ),
    "chronicle": (
        (
            "In the year of the {quality} {thing}, {a} ruled over {place}.",
            "It is written that in {season} {b} marched upon {place}.",
            "In those days {sight}, and the people of {place} were {mood}.",
            "After {number} years of {weather}, {a} was crowned at {place}.",
            "On a {day} in {season} came {a} to {place}, and {sight}.",
        ),
        (
            "And {a} sent for the {role}, and {b} was sent for also.",
            "Then the {role} {deed} before the whole council, {manner}.",
            "A law was made that none should own a {thing} except {a}.",
            "{b} swore upon the {thing} to serve {a} for {number} winters.",
            "Of the {thing} it was told that {b} had {deed} for it.",
            "And {number} times {b} asked for the {quality} {thing2}, and {a} was {mood}.",
        ),
        (
            "The wise men answered that {lore}.",
            "But the army of {b} was {mood}, because {reason}.",
            "There fell {number} captains, and {a} mourned them {manner}.",
            "And a sign was seen at {place2}: {sight}.",
            "Many a {role} was {mood} in that {season}.",
            "Some say that {a} {deed} {time}, others that {b} {deed2}.",
        ),
        (
            "Thus the {quality} {thing} passed from {a} to {b}.",
            "They made peace {time} and {deed} together.",
            "The walls of {place2} were raised by {number} hundred hands.",
            "And {b} gave {a} a {quality} {thing2} as ransom.",
            "For {number} days {a} was kept at {place2}, where {sight}.",
        ),
        (
            "This was the end of the war for the {thing}.",
            "After that, little is told of {b}, save that {b.he} was {mood}.",
            "The scribes of {place} closed their books {manner}.",
            "So {a} reigned on in {weather}, until the {season}.",
        ),
    ),
}

# How only the general prose speaks, beside the voices of the books.
PLAIN: tuple[tuple[str, ...], ...] = (
    (
        "This is what happened to {a} {time}: {sight}.",
        "Everyone in the street talked about {place}, where {b} {deed}.",
        "It was {season}, and the {role} had nothing to do but wait for {a}.",
        "People who live near {place} are seldom {mood}.",
        "One {day} the {quality} {thing} of {a} was gone.",
    ),
    (
        "A {thing} costs {number} coins, and a {thing2} costs even more.",
        "The {role} knew {a} well and {deed} with {a.him} in {season}.",
        "First {b} {deed}, and after that {b.he} {deed2}.",
        "{a} owned a {quality} {thing}, which {b} often borrowed.",
        "Between {place} and {place2} there are {number} houses.",
        "It rained for {number} days, so {b} stayed {mood} at home.",
    ),
    (
        "Does it matter that {lore}?",
        "Some were {mood}, some {mood2}, and only {b} said nothing.",
        "They asked the {role} for help, because {reason}.",
        "If {a} had {deed}, {b} would not have been {mood}.",
        "No {role} likes {weather}, but {a} did not mind.",
    ),
    (
        "In the end the {thing} was found {time} at {place2}.",
        "{b} paid {number} coins and went away {manner}.",
        "Later {a} told the story to a {role2}, and {sight}.",
        "So the {quality} {thing2} changed hands for the {number} hundredth time.",
    ),
    (
        "That is all there is to say about {b}.",
        "Since then {a} has {deed} every {day}.",
        "Nothing like it was seen again until {season}.",
        "And {b} is {mood} to this day, because {lore}.",
    ),
)
