"""Common English words, most of them one token with a leading space in most vocabularies."""

_TEXT = """
time year people way day man thing woman life child world school state family
student group country problem hand part place case week company system program question work
government number night point home water room mother area money story fact month lot right study
book eye job word business issue side kind head house service friend father power hour game line
end member law car city community name president team minute idea body information back parent
face others level office door health person art history party result change morning reason
research moment air teacher force education foot age policy music market sense nation plan college
interest experience effect use class control field development role light voice police mind price
report decision son view relationship town road arm difference value building action season
society tax director position player record paper space ground form event official matter center
couple site project activity star table need court oil situation cost industry figure street image
phone data picture practice piece land product doctor wall patient worker news test movie north
love support technology step baby computer type attention film tree source hair window culture
chance energy period course summer plant opportunity term letter condition choice rule daughter
south floor campaign material population economy medical hospital church risk fire future bank
west sport board subject officer rest behavior performance top goal second bed order author agency
nature color store sound movement page race concern series language response animal factor decade
article east artist scene stock career treatment approach size dog fund media sign thought list
individual quality pressure answer resource meeting disease success cup amount ability staff
character growth loss degree region television box training trade deal election feeling standard
bill message analysis benefit forward lawyer section glass skill sister professor operation stage
compare authority design sort knowledge station strategy truth song example environment leg dark
various rather laugh guess executive prove entire rock forget
"""
# Consonants and vowels in turn, so that vocabularies made of syllables have them, too.
_SYLLABLES = """
make take give like live move come some same safe save wide wave vote tone rate ride rise rose sale
sure tape base bike bone cake cave code core date dose fate file fine five gate gene hide hire hole
hope joke lake lane late mile mine mode more nine none nose note pace pile pine pole pure rare rice
rope sofa solo tale tire tube vice wage wake wife wine wire wise zone zero tomato potato banana
"""
WORDS = tuple((_TEXT + _SYLLABLES).split())
