package halflife.node;

import java.util.HashMap;
import java.util.Locale;
import java.util.Map;
import java.util.function.UnaryOperator;
import org.apache.lucene.analysis.TokenStream;
import org.apache.lucene.analysis.ar.ArabicStemFilter;
import org.apache.lucene.analysis.bg.BulgarianStemFilter;
import org.apache.lucene.analysis.bn.BengaliStemFilter;
import org.apache.lucene.analysis.br.BrazilianStemFilter;
import org.apache.lucene.analysis.ckb.SoraniStemFilter;
import org.apache.lucene.analysis.cz.CzechStemFilter;
import org.apache.lucene.analysis.de.GermanLightStemFilter;
import org.apache.lucene.analysis.de.GermanMinimalStemFilter;
import org.apache.lucene.analysis.el.GreekStemFilter;
import org.apache.lucene.analysis.en.EnglishMinimalStemFilter;
import org.apache.lucene.analysis.en.EnglishPossessiveFilter;
import org.apache.lucene.analysis.en.KStemFilter;
import org.apache.lucene.analysis.en.PorterStemFilter;
import org.apache.lucene.analysis.es.SpanishLightStemFilter;
import org.apache.lucene.analysis.es.SpanishPluralStemFilter;
import org.apache.lucene.analysis.fa.PersianStemFilter;
import org.apache.lucene.analysis.fi.FinnishLightStemFilter;
import org.apache.lucene.analysis.fr.FrenchLightStemFilter;
import org.apache.lucene.analysis.fr.FrenchMinimalStemFilter;
import org.apache.lucene.analysis.gl.GalicianMinimalStemFilter;
import org.apache.lucene.analysis.gl.GalicianStemFilter;
import org.apache.lucene.analysis.hi.HindiStemFilter;
import org.apache.lucene.analysis.hu.HungarianLightStemFilter;
import org.apache.lucene.analysis.id.IndonesianStemFilter;
import org.apache.lucene.analysis.it.ItalianLightStemFilter;
import org.apache.lucene.analysis.lv.LatvianStemFilter;
import org.apache.lucene.analysis.no.NorwegianLightStemFilterFactory;
import org.apache.lucene.analysis.no.NorwegianMinimalStemFilterFactory;
import org.apache.lucene.analysis.pt.PortugueseLightStemFilter;
import org.apache.lucene.analysis.pt.PortugueseMinimalStemFilter;
import org.apache.lucene.analysis.pt.PortugueseStemFilter;
import org.apache.lucene.analysis.ru.RussianLightStemFilter;
import org.apache.lucene.analysis.snowball.SnowballFilter;
import org.apache.lucene.analysis.sv.SwedishLightStemFilter;

/** The stemmers that the {@code stemmer} filter's {@code language} may name. */
final class Stemmers {
    private static final Map<String, UnaryOperator<TokenStream>> BY_NAME = new HashMap<>();

    static {
        for (String language : new String[] {
            "armenian", "basque", "catalan", "danish", "dutch", "estonian", "finnish", "french", "german", "hungarian", "irish",
            "italian", "lithuanian", "norwegian", "portuguese", "romanian", "russian", "serbian", "spanish", "swedish", "turkish" }) {
            String snowball = language.substring(0, 1).toUpperCase(Locale.ROOT) + language.substring(1);
            put(input -> new SnowballFilter(input, snowball), language);
        }
        put(ArabicStemFilter::new, "arabic");
        put(BengaliStemFilter::new, "bengali");
        put(BrazilianStemFilter::new, "brazilian");
        put(BulgarianStemFilter::new, "bulgarian");
        put(CzechStemFilter::new, "czech");
        put(PorterStemFilter::new, "english", "porter");
        put(KStemFilter::new, "light_english", "kstem");
        put(EnglishMinimalStemFilter::new, "minimal_english");
        put(EnglishPossessiveFilter::new, "possessive_english");
        put(input -> new SnowballFilter(input, "English"), "porter2");
        put(FinnishLightStemFilter::new, "light_finnish", "light_finish");
        put(FrenchLightStemFilter::new, "light_french");
        put(FrenchMinimalStemFilter::new, "minimal_french");
        put(GalicianStemFilter::new, "galician");
        put(GalicianMinimalStemFilter::new, "minimal_galician");
        put(input -> new SnowballFilter(input, "German"), "german2");
        put(GermanLightStemFilter::new, "light_german");
        put(GermanMinimalStemFilter::new, "minimal_german");
        put(GreekStemFilter::new, "greek");
        put(HindiStemFilter::new, "hindi");
        put(HungarianLightStemFilter::new, "light_hungarian");
        put(IndonesianStemFilter::new, "indonesian");
        put(ItalianLightStemFilter::new, "light_italian");
        put(LatvianStemFilter::new, "latvian");
        put(new NorwegianLightStemFilterFactory(new HashMap<>())::create, "light_norwegian");
        put(new NorwegianMinimalStemFilterFactory(new HashMap<>())::create, "minimal_norwegian");
        put(new NorwegianLightStemFilterFactory(new HashMap<>(Map.of("variant", "nn")))::create, "light_nynorsk");
        put(new NorwegianMinimalStemFilterFactory(new HashMap<>(Map.of("variant", "nn")))::create, "minimal_nynorsk");
        put(PersianStemFilter::new, "persian");
        put(PortugueseLightStemFilter::new, "light_portuguese");
        put(PortugueseMinimalStemFilter::new, "minimal_portuguese");
        put(PortugueseStemFilter::new, "portuguese_rslp");
        put(RussianLightStemFilter::new, "light_russian");
        put(SpanishLightStemFilter::new, "light_spanish");
        put(SpanishPluralStemFilter::new, "spanish_plural");
        put(SoraniStemFilter::new, "sorani");
        put(SwedishLightStemFilter::new, "light_swedish");
    }

    private Stemmers() {}

    /** The stemmer of that name, with or without underscores and in any case. */
    static UnaryOperator<TokenStream> named(String name) {
        UnaryOperator<TokenStream> stemmer = BY_NAME.get(key(name));
        if (stemmer == null) {
            throw new IllegalArgumentException("Unknown stemmer [" + name + "]");
        }
        return stemmer;
    }

    private static void put(UnaryOperator<TokenStream> stemmer, String... names) {
        for (String name : names) {
            BY_NAME.put(key(name), stemmer);
        }
    }

    private static String key(String name) {
        return name.replace("_", "").toLowerCase(Locale.ROOT);
    }
}
